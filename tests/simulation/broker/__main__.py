"""The model as a program, in nats-server's place: `python -m tests.simulation.broker --port 0`, or `-c nats.conf`.

It understands as much of a configuration as `services/cli/supervision/nats_server.py` writes.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.nats.accounts import API, MAPPED
from tests.simulation.broker.configs import Permissions
from tests.simulation.broker.disk import Disk
from tests.simulation.broker.jetstream import STORE, JetStream
from tests.simulation.broker.server import MAX_PAYLOAD, Server

WRITE_INTERVAL = 0.02  # seconds between two writings of what has changed
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*|[{}\[\]]|[^\s{}\[\],:="]+(?::[^\s{}\[\],="]+)*|[:=,]')


def parse(text: str) -> dict[str, Any]:
    """A configuration of nats-server: names with values, `{}` and `[]`."""
    tokens = iter([token for token in _TOKENS.findall(text) if token not in ":=," and token[0] != "#"])
    return _table(tokens)


def _table(tokens: Iterator[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in tokens:
        if name == "}":
            break
        made[_plain(name.rstrip(":"))] = _value(next(tokens), tokens)
    return made


def _value(token: str, tokens: Iterator[str]) -> Any:
    if token == "{":
        return _table(tokens)
    if token == "[":
        return list(iter(lambda: _value(following, tokens) if (following := next(tokens)) != "]" else None, None))
    return _plain(token)


def _plain(token: str) -> str:
    return str(json.loads(token)) if token.startswith('"') else token


def users_of(config: dict[str, Any]) -> dict[str, tuple[str, Permissions]]:
    found = {}
    accounts = [one for one in config.get("accounts", {}).values() if isinstance(one, dict)]
    for user in (user for account in accounts for user in account.get("users", [])):
        given = user.get("permissions", {})
        allowed = [given[kind]["allow"] if kind in given else None for kind in ("publish", "subscribe")]
        publish, subscribe = (
            None if one is None else tuple(subject.replace(MAPPED, API) for subject in one) for one in allowed
        )
        found[user["user"]] = (user["password"], Permissions(publish, subscribe))
    return found


async def serve(config: dict[str, Any], port: int) -> None:
    """Runs until it is told to end."""
    stored, disk = config.get("jetstream"), Disk()
    path = Path(stored["store_dir"]) / "model" if isinstance(stored, dict) else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.read(path)
    draw = random.Random()
    room = int(stored.get("max_file_store", STORE)) if isinstance(stored, dict) else STORE
    without = config and path is None
    server = Server(
        config.get("server_name", f"model{os.getpid()}"),
        draw,
        users=users_of(config),
        max_payload=int(config.get("max_payload", MAX_PAYLOAD)),
        jetstream=lambda clients: None if without else JetStream(clients, draw, store=room, disk=disk),
    )
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    port = await server.listen("127.0.0.1", port)
    print(port, flush=True)  # noqa: T201
    if ports := config.get("ports_file_dir"):
        told = {"nats": [f"nats://127.0.0.1:{port}"]}
        (Path(ports) / f"nats-server_{os.getpid()}.ports").write_text(json.dumps(told))
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), WRITE_INTERVAL if disk.dirty else 10 * WRITE_INTERVAL)
        if path is not None:
            _write(disk, path)
    await server.stop()
    if path is not None:
        _write(disk, path)


def _write(disk: Disk, path: Path) -> None:
    try:
        disk.write(path)
    except OSError as error:
        disk.full = disk.dirty = True
        logging.getLogger(__name__).error("JetStream: %s", (error.strerror or str(error)).lower())


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.simulation.broker", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: one that the system chooses, which is printed")
    parser.add_argument("-c", dest="config", type=Path, help="a configuration of nats-server")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[INF] %(message)s")
    config = parse(given.config.read_text()) if given.config else {}
    port = int(str(config.get("listen", f":{given.port}")).rpartition(":")[2])
    asyncio.run(serve(config, max(0, port)))


if __name__ == "__main__":
    main()

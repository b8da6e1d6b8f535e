"""One nats-server for many tests, each in an account of its own, since to start and to stop one takes as long as many
a test."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import SecretStr

from services.cli.supervision.nats_server import MAX_PAYLOAD, START_TIMEOUT, find_binary
from shared.config import CommonSettings
from shared.nats import subjects
from shared.process import die_with_parent

# Of a server. Then another one is started, so that streams which nobody uses any more do not add up.
ACCOUNTS = 40
ROOM = "100TB"  # streams reserve the bytes that they may hold, those of all accounts together
# Where stores lie if there is room for them: a server waits for its disk at every stream that it makes, of which a
# gateway has dozens, so that one on a disk needs twice the time and the CPU.
MEMORY = Path("/dev/shm")
STORE_BYTES = 1 << 30  # more than a server's accounts have ever held


class NatsAccounts:
    """Servers, one at a time. Use: `settings` for each test; `stop` at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers = 0
        self._store: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._password = secrets.token_urlsafe(24)
        self._free: list[str] = []

    def settings(self) -> CommonSettings:
        """Of an account that has nothing in it, for the user who may do everything there."""
        if not self._free:
            self.stop()
            self._start()
        password = SecretStr(self._password)
        return CommonSettings(nats_url=self._url, nats_user=self._free.pop(), nats_password=password)

    def stop(self) -> None:
        """At once: nobody reads its store again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._store is not None:
            self._store.cleanup()

    def _start(self) -> None:
        self._servers += 1
        directory = self._directory / str(self._servers)
        directory.mkdir()
        self._store = tempfile.TemporaryDirectory(
            prefix="ryzanstein-nats-", dir=MEMORY if _has_room(MEMORY) else directory
        )
        (directory / "nats.conf").write_text(self._config(directory, self._store.name))
        with (directory / "nats.log").open("wb") as log:
            command = [str(find_binary()), "-c", str(directory / "nats.conf")]
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),  # who is killed stops nothing
            )
        self._url = next(self._urls(directory / f"nats-server_{self._process.pid}.ports"))
        self._free = [f"user-{number}" for number in range(ACCOUNTS)]

    def _urls(self, ports: Path) -> Iterator[str]:
        """Its address, as soon as it has written it."""
        assert self._process is not None
        end = time.monotonic() + START_TIMEOUT
        while not ports.exists() or not (text := ports.read_text()).endswith("}"):
            assert self._process.poll() is None, ports.with_name("nats.log").read_text()
            assert time.monotonic() < end, "nats-server did not start"
            time.sleep(0.005)
        yield str(json.loads(text)["nats"][0])

    def _config(self, directory: Path, store: str) -> str:
        """Each account hears of its own connections, as `services.cli` has it for the one of a local stack."""
        events = [(subjects.CONNECTION_OPENED, "CONNECT"), (subjects.CONNECTION_CLOSED, "DISCONNECT")]
        exports = ", ".join(f'{{ stream: "$SYS.ACCOUNT.*.{event}" }}' for _, event in events)
        accounts = ""
        for number in range(ACCOUNTS):
            imports = ", ".join(
                f'{{ stream: {{ account: SYS, subject: "$SYS.ACCOUNT.T{number}.{event}" }}, to: "{subject}" }}'
                for subject, event in events
            )
            user = f'{{ user: "user-{number}", password: "{self._password}" }}'
            accounts += f"  T{number} {{ jetstream: enabled, users: [ {user} ], imports: [ {imports} ] }}\n"
        return (
            f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(directory))}\nmax_payload: {MAX_PAYLOAD}\n'
            f"jetstream {{ store_dir: {json.dumps(store)}, max_file_store: {ROOM} }}\n"
            f"accounts {{\n  SYS {{ exports: [ {exports} ] }}\n{accounts}}}\nsystem_account: SYS\n"
        )


def _has_room(directory: Path) -> bool:
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= STORE_BYTES

"""How long a host takes to load a model, from the command to the first heartbeat that says it is ready:
`python -m benchmarks.host --help`.

    first     weights are built from the checkpoint, and kept packed beside the model in the background
    second    a forked rank reads the packed weights
    woken     the same, after the model has slept

The broker and one executor run on this machine; the executor's port and data end with it. Files are in the page cache.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Rounds, Sheet, median, publish, run
from benchmarks.processes import nats_variables
from benchmarks.random_model import shape_option, write_servable
from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.messages import Heartbeat, HostReply, LoadModel, ModelSettings, ModelSpec, UnloadModel
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from shared.process import die_with_parent

INSTANCE, GROUP, MODEL = "host", "group", "model"
PATIENCE = 600.0


class Executor:
    """A host, and what it has said last."""

    def __init__(self, bus: Bus, log: Path) -> None:
        self._bus = bus
        self._log = log
        self._beat = asyncio.Condition()
        self.last: Heartbeat | None = None

    async def on_beat(self, beat: Heartbeat) -> None:
        async with self._beat:
            self.last = beat
            self._beat.notify_all()

    async def until(self, holds: Callable[[Heartbeat], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self._beat:
            await self._beat.wait_for(lambda: self.last is not None and holds(self.last))

    async def load(self, spec: ModelSpec) -> float:
        """Seconds from the command to the heartbeat that says that the group is ready."""
        began = time.perf_counter()
        await self._tell(LoadModel(GROUP, spec))
        await self.until(self._is_ready)
        return time.perf_counter() - began

    async def unload(self, *, sleep: bool = False) -> None:
        await self._tell(UnloadModel(GROUP, sleep=sleep))
        state = "sleeping" if sleep else "stored"

        def is_done(beat: Heartbeat) -> bool:
            said = [one.state for one in beat.host.models if one.model == MODEL] if beat.host else []
            return not beat.groups and said == [state]

        await self.until(is_done)

    def phases(self) -> dict[str, Any]:
        """Of the last load, as its rank has logged them."""
        lines = [
            msgspec.json.decode(line) for line in self._log.read_text().splitlines() if line.startswith("{")
        ]
        loaded = [line for line in lines if line["event"] == "rank_loaded"][-1]
        started = [line for line in lines if line["event"] == "rank_started"][-1]
        names = ("weights", "kv_cache", "warm_up")
        return {
            "cached": loaded["cached"],
            "forked": started["forked"],
            **{name: loaded[name] for name in names},
        }

    async def kept(self) -> None:
        """Until the packed weights are on disk."""
        async with asyncio.timeout(PATIENCE):
            while '"weights_kept"' not in self._log.read_text():
                await self.until(lambda beat, last=self.last: beat is not last)  # type: ignore[misc]

    async def _tell(self, command: Any) -> None:
        reply = await self._bus.request(subjects.host_control(INSTANCE), command, HostReply, timeout=60)
        if not reply.ok:
            raise BenchError(reply.error)

    @staticmethod
    def _is_ready(beat: Heartbeat) -> bool:
        if beat.host is not None and (failed := [one for one in beat.host.models if one.state == "failed"]):
            raise BenchError(failed[0].error)
        return any(group.state == "ready" for group in beat.groups)


async def measure(
    scratch: Path, spec: ModelSpec, rounds: int, cache: Path
) -> dict[str, list[dict[str, Any]]]:
    """Seconds of each load, with its phases, by kind."""
    server = LocalNats(scratch / "nats")
    await server.start()
    bus = await Bus.connect(server.settings(), "benchmark")
    await ensure_streams(bus)
    log = scratch / "executor.log"
    process = _start(server.settings(), log, cache)
    try:
        executor = Executor(bus, log)
        await bus.subscribe(subjects.beats("executor", INSTANCE), Heartbeat, executor.on_beat)
        await executor.until(lambda beat: beat.state == "ready")
        found: dict[str, list[dict[str, Any]]] = {"first": [], "second": [], "woken": []}

        async def load(kind: str) -> None:
            seconds = await executor.load(spec)
            found[kind].append({"total": round(seconds, 3), **executor.phases()})

        await load("first")
        await executor.kept()
        for _ in range(rounds):
            await executor.unload()
            await load("second")
        for _ in range(rounds):
            await executor.unload(sleep=True)
            await load("woken")
        return found
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        await bus.close()
        await server.stop()


def _start(settings: CommonSettings, log: Path, cache: Path) -> "subprocess.Popen[bytes]":
    variables = {
        **nats_variables(settings),
        "RYZANSTEIN_INSTANCE": INSTANCE,
        "RYZANSTEIN_MODEL_CACHE": str(cache),
        "RYZANSTEIN_WEIGHT_CACHE_BYTES": str(64 << 30),
        "RYZANSTEIN_LOG_FORMAT": "json",
        "RYZANSTEIN_DRAIN_GRACE": "0",
        "RYZANSTEIN_HANDOVER_TIMEOUT": "0",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "services.executor"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(),
        )


def main(
    tokenizer: Annotated[Path, typer.Option(help="A model directory whose tokenizer the random model gets.")],
    shape: Annotated[str, typer.Option(help="Shape of a random Llama, as of benchmarks.start.")] = "1.1b",
    tp: Annotated[int, typer.Option(help="Ranks.", min=1)] = 1,
    rounds: Rounds = 5,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the model is made; kept, and used again. Default: a temporary one."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Loads, unloads and wakes a random model on one host."""
    with TemporaryDirectory(prefix="ryzanstein-bench-") as made:
        scratch = Path(made)
        model = (directory or scratch / "models") / f"random-{shape.replace(',', '-')}"
        if not model.exists():
            write_servable(model, shape_option(shape), tokenizer)
        spec = ModelSpec(MODEL, str(model), settings=ModelSettings(tp=tp))
        found = asyncio.run(measure(scratch, spec, rounds, scratch / "cache"))
    rows = [(kind, *one.values()) for kind, loads in found.items() for one in loads]
    middle = {kind: median([one["total"] for one in found[kind]]) for kind in ("second", "woken")}
    said = [f"{kind}: median {seconds:.3f} s" for kind, seconds in middle.items()]
    names = [name for name in found["first"][0] if name != "total"]
    publish(found, Sheet(("load", "total s", *names), rows), *said, json=json)


if __name__ == "__main__":
    run(main)

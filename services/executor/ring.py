"""The processes of one ring, from their start to their end, as one thing: there is no half a ring.

spawn all ranks ─▶ rank 0 says where to meet ─▶ told to the others ─▶ all load ─▶ rank 0: ready
     └── any rank ends, in whatever way ──▶ the ring is lost ──▶ all are killed
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from services.executor.board import RingBoard
from services.executor.settings import ExecutorSettings
from shared.process import die_with_parent

log = structlog.get_logger(__name__)

LEAVE_TIMEOUT = 5.0


def thread_count(settings: ExecutorSettings) -> int:
    """CPU threads of each rank: what was set, else the cores shared out among the ranks."""
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.tp)


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank process is told at its start, as one JSON line on its standard input."""

    rank: int
    world_size: int
    group: str
    instance: str
    epoch: int
    board: str
    settings: dict[str, object]


class Rendezvous(msgspec.Struct, frozen=True, tag="rendezvous"):
    """Rank 0 → orchestrator → the other ranks: where the ring meets."""

    host: str
    plan_port: int
    store_port: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank 0: the group takes requests."""

    model: str


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Rank 0: told to drain over the bus, and done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Any rank: why it ends. `code` is one of `shared.errors`."""

    code: str
    message: str


RankEvent = Rendezvous | Ready | Drained | Failed
_event_decoder = msgspec.json.Decoder(RankEvent)


class RingEnd(msgspec.Struct, frozen=True):
    """How a ring ended."""

    kind: Literal["drained", "failed", "died"]
    reason: str
    code: str = ""


class Ring:
    """One life of a group's ranks. `start`, then `wait_end`, then always `kill`."""

    def __init__(self, settings: ExecutorSettings, group: str, instance: str) -> None:
        self._settings = settings
        self._group = group
        self._instance = instance
        self.epoch = time.time_ns() // 1_000_000
        self.ready = asyncio.Event()
        self.model = ""
        self._directory = Path(tempfile.mkdtemp(prefix="ryzanstein-ring-"))
        self.board = RingBoard(self._directory / "board", settings.tp, create=True)
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[RingEnd] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts every rank. Returns at once; `ready` is set when the group takes requests."""
        for rank in range(self._settings.tp):
            await self._spawn(rank)

    async def wait_end(self) -> RingEnd:
        return await asyncio.shield(self._end)

    def lose(self, reason: str) -> None:
        """Gives the ring up, because of something that only the orchestrator sees."""
        self._finish(RingEnd("died", reason))

    def drain(self) -> None:
        """Has the leader finish what runs; the ring ends by itself then."""
        self._tell(0, b"drain\n")

    async def kill(self) -> None:
        """Ends every process and frees what the ring held. Safe to call twice.

        The ranks of a drained ring leave by themselves, in good order; only stragglers are killed.
        """
        if self._end.done() and self._end.result().kind == "drained":
            leaving = [asyncio.ensure_future(process.wait()) for process in self._processes]
            await asyncio.wait(leaving, timeout=LEAVE_TIMEOUT)
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        for process in self._processes:
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._directory.exists():
            self.board.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _spawn(self, rank: int) -> None:
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.executor.rank",
                str(write_end),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_end,),
                preexec_fn=die_with_parent(signal.SIGKILL),
                start_new_session=True,  # Ctrl-C goes to the orchestrator alone, which drains the ring
                env=self._environment(),
            )
        finally:
            os.close(write_end)
        self._processes.append(process)
        self._tell(rank, msgspec.json.encode(self._spec(rank)) + b"\n")
        self._readers.append(asyncio.create_task(self._follow_events(rank, read_end)))
        self._readers.append(asyncio.create_task(self._follow_exit(rank, process)))

    def _environment(self) -> dict[str, str]:
        """OpenMP reads these when torch is imported. Threads that spin while they wait take the cores from
        the other ranks and services of the machine."""
        threads = str(thread_count(self._settings))
        return {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": threads, **os.environ}

    def _spec(self, rank: int) -> RankSpec:
        settings = self._settings.model_dump(mode="json")
        settings["nats_password"] = self._settings.nats_password.get_secret_value()
        return RankSpec(
            rank=rank,
            world_size=self._settings.tp,
            group=self._group,
            instance=self._instance,
            epoch=self.epoch,
            board=str(self._directory / "board"),
            settings=settings,
        )

    def _tell(self, rank: int, line: bytes) -> None:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        if not stdin.is_closing():
            stdin.write(line)

    async def _follow_events(self, rank: int, read_end: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        try:
            async for line in reader:
                self._on_event(rank, _event_decoder.decode(line))
        finally:
            transport.close()

    def _on_event(self, rank: int, event: RankEvent) -> None:
        match event:
            case Rendezvous():
                line = msgspec.json.encode(event) + b"\n"
                for follower in range(1, self._settings.tp):
                    self._tell(follower, line)
            case Ready(model):
                self.model = model
                self.ready.set()
            case Drained():
                self._finish(RingEnd("drained", "the group was drained"))
            case Failed(code, message):
                self._finish(RingEnd("failed", message, code))

    async def _follow_exit(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await asyncio.sleep(0.05)  # the event that says why may still be in the pipe
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        self._finish(RingEnd("died", f"rank {rank} (process {process.pid}) ended with {how}"))

    def _finish(self, end: RingEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

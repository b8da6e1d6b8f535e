"""The processes of one ring, from their start to their end, as one thing: there is no half a ring.

spawn all ranks ─▶ rank 0 says where to meet ─▶ told to the others ─▶ all load ─▶ rank 0: ready
     └── any rank ends, in whatever way ──▶ the ring is lost ──▶ all are killed
"""

import asyncio
import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from services.executor.board import RingBoard
from services.executor.handover.board import HandoverBoard
from services.executor.settings import ExecutorSettings
from shared.process import die_with_parent

log = structlog.get_logger(__name__)

LEAVE_TIMEOUT = 5.0
SPIN_COUNT = "10000"
"""Turns that an OpenMP thread waits before it sleeps: the time between two operations."""


def thread_count(settings: ExecutorSettings) -> int:
    """CPU threads of each rank: what was set, else the cores shared out among the ranks."""
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.tp)


def cores_of(settings: ExecutorSettings, rank: int) -> list[int]:
    """The core of each of a rank's threads; empty where they are not to be kept on one. With fewer threads than
    cores the system places them better: it knows what else runs."""
    cores, threads = sorted(os.sched_getaffinity(0)), thread_count(settings)
    if not settings.pin_threads or threads * settings.tp != len(cores):
        return []
    return cores[rank * threads : (rank + 1) * threads]


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
    """Rank 0 → orchestrator → the other ranks: where the ring meets, and what it loads."""

    host: str
    plan_port: int
    secret: str
    """What a rank shows to be taken for one."""
    store_port: int = 0
    model_directory: str = ""
    """Resolved once, by rank 0: a download or conversion happens once per ring."""
    shared_memory: str = ""
    """What the ranks map to share memory; empty: they meet in torch's process group, at `store_port`."""
    backend: str = ""
    """Of that process group."""


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

    def __init__(self, settings: ExecutorSettings, group: str, instance: str, epoch: int) -> None:
        """`epoch`: larger than that of any earlier ring of the group."""
        self._settings = settings
        self._group = group
        self._instance = instance
        self.epoch = epoch
        self.ready = asyncio.Event()
        self.model = ""
        self._directory = Path(tempfile.mkdtemp(prefix="ryzanstein-ring-"))
        self.board = RingBoard(self._directory / "board", settings.tp, create=True)
        board = HandoverBoard.path(self._directory / "board")
        self.handover = HandoverBoard(board, settings.tp, create=True)
        self._processes: list[asyncio.subprocess.Process] = []
        self._events: dict[int, asyncio.Task[None]] = {}
        self._exits: list[asyncio.Task[None]] = []
        self._killed = False
        self._end: asyncio.Future[RingEnd] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts every rank. Returns at once; `ready` is set when the group takes requests."""
        for rank in range(self._settings.tp):
            if not self._killed:
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
        self._killed = True
        if self._end.done() and self._end.result().kind == "drained":
            leaving = [asyncio.ensure_future(process.wait()) for process in self._processes]
            await asyncio.wait(leaving, timeout=LEAVE_TIMEOUT)
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        for process in self._processes:
            await process.wait()
        followers = [*self._events.values(), *self._exits]
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        if self._directory.exists():
            self.board.close()
            self.handover.close()
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
        self._events[rank] = asyncio.create_task(self._follow_events(rank, read_end))
        self._exits.append(asyncio.create_task(self._follow_exit(rank, process)))
        if self._killed:  # while the process was being started
            process.kill()
            await process.wait()

    def _environment(self) -> dict[str, str]:
        """OpenMP reads these when torch is imported. A thread that waits spins for a moment only, which
        bridges the gap between two operations: one that spins for long takes the core from the other
        ranks and services of the machine, and one that sleeps at once is woken too late."""
        threads = str(thread_count(self._settings))
        own = {"GOMP_SPINCOUNT": SPIN_COUNT, "OMP_NUM_THREADS": threads}
        if ipaddress.ip_address(socket.gethostbyname(self._settings.ring_host)).is_loopback:
            own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {**own, **os.environ}

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
        # What the rank said last may still be in the pipe, which ends with the process.
        await asyncio.wait({self._events[rank]}, timeout=LEAVE_TIMEOUT)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        self._finish(RingEnd("died", f"rank {rank} (process {process.pid}) ended with {how}"))

    def _finish(self, end: RingEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

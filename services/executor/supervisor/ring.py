"""The processes of one ring, from their start to their end, as one thing: there is no half a ring.

spawn all ranks ─▶ rank 0 says where to meet ─▶ told to the others ─▶ all load ─▶ rank 0: ready
     └── any rank ends, in whatever way ──▶ the ring is lost ──▶ all are killed

A rank that misses another may say so before that one's end is seen. Which rank ended, and how, says more than who
missed it: that is waited for a moment.
"""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import structlog

from services.executor.core.gpu_errors import EXTERNAL
from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.ipc.activity import ActivityPage
from services.executor.ipc.board import RingBoard, RingState
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.ipc.rank_pipe import (
    DRAIN,
    AdaptersHeld,
    Drained,
    Failed,
    RankEvent,
    RankSpec,
    Ready,
    Rendezvous,
    Requested,
)
from services.executor.kv_transfer.board import HandoverBoard
from services.executor.supervisor.failure_detection import cause_of_exit, death_of, oom_kills
from services.executor.supervisor.multinode.head import HeadNode, RemoteRank
from services.executor.supervisor.ranks.rank_process import ForkClient, ForkedRank, LocalRank, StartRank
from shared.messages import GroupTraits, RingDeath, StreamedWeights
from shared.nats.bus import Bus

log = structlog.get_logger(__name__)

LEAVE_TIMEOUT = 5.0
NAMING_PATIENCE = 1.0  # seconds in which the end of a rank is noticed after another has missed it
KILL_PATIENCE = 10.0  # seconds after which a process that has been killed and does not end is worth a word


_event_decoder = msgspec.json.Decoder(RankEvent)


class RingEnd(msgspec.Struct, frozen=True):
    kind: Literal["drained", "failed", "died"]
    reason: str
    code: str = ""
    cause: str = EXTERNAL  # as in `supervisor/failure_detection.py`


class GroupHost(Protocol):
    """What rings, groups and jobs need of the executor whose they are."""

    instance: str
    # Where leaders say that somebody waits for their rings; None: nothing pauses meanwhile.
    activity: ActivityPage | None
    start_rank: StartRank

    @property
    def bus(self) -> Bus: ...

    @property
    def forks(self) -> ForkClient: ...

    async def beat_now(self) -> None: ...


class Ring:
    """One life of a group's ranks. `start`, then `wait_end`, then always `kill`."""

    def __init__(
        self,
        settings: ExecutorSettings,
        group: str,
        host: GroupHost,
        epoch: int,
        nodes: HeadNode | None,
        variables: Mapping[str, str],
    ) -> None:
        """`epoch`: larger than that of any earlier ring of the group. `nodes`: the other hosts, all of them there.
        `variables`: of the environment of its ranks on this host, whatever ours has."""
        self._settings = settings
        self._variables = variables
        self._nodes = nodes
        self._group = group
        self._host = host
        self.epoch = epoch
        self.ready = asyncio.Event()
        self.model = ""
        # Most that the KV caches of all ranks take together: ranks differ by a head at most.
        self.kv_bytes = 0
        self.imports: list[str] = []
        self.kernels = ""  # what `Ready` tells of them
        self.streamed: StreamedWeights | None = None  # of all ranks; None: all weights are in memory
        self.traits: GroupTraits | None = None  # None: not known yet
        self.adapters: list[str] = []  # digests of the LoRA adapters in memory
        self.given_up = ""  # why the supervisor has had enough of it, where it has
        # Of files that end with the ring.
        self.directory = Path(tempfile.mkdtemp(prefix="ryzanstein-ring-"))
        self.board = RingBoard(self.directory / "board", settings.tp, create=True)
        self.flight = FlightRecorder.beside(self.directory / "board", settings.tp, create=True)
        board = HandoverBoard.path(self.directory / "board")
        self.handover = HandoverBoard(board, settings.tp, create=True)
        self._processes: list[LocalRank | RemoteRank] = []
        self._events: dict[int, asyncio.Task[None]] = {}
        self._exits: list[asyncio.Task[None]] = []
        self._rendezvous = b""  # what rank 0 has said of it, for those that are started later
        self._missed = False  # whether some rank has said that another is gone
        self._oom_kills = oom_kills()  # before it began
        self._killed = False
        self._activity = host.activity
        self._slot = self._activity.take() if self._activity is not None else None
        self._end: asyncio.Future[RingEnd] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts every rank. Returns at once; `ready` is set when the group takes requests."""
        for rank in range(self._settings.tp):
            if not self._killed:
                await self._spawn(rank)

    async def wait_end(self) -> RingEnd:
        return await asyncio.shield(self._end)

    def lose(self, reason: str, cause: str = EXTERNAL) -> None:
        """Gives the ring up, because of something that only the supervisor sees."""
        self.given_up = reason
        self._finish(RingEnd("died", reason, cause=cause))

    def death(self, cause: str) -> RingDeath:
        """What is told of its end by `cause`, while its files are there."""
        return death_of(self.epoch, cause, self.flight.plans.read())

    @property
    def state(self) -> Literal["starting", "ready", "draining"]:
        if not self.ready.is_set():
            return "starting"
        return "draining" if self.board.state is RingState.DRAINING else "ready"

    @property
    def loaded(self) -> float:
        """Share of the weights that has been read, 0 to 1."""
        return 1.0 if self.ready.is_set() else self.board.loaded

    @property
    def stage(self) -> str:
        """What takes its time until it is ready, and how far it is, in quarters; empty: nothing that is told of."""
        share = self.board.loaded
        if self.ready.is_set() or not share:
            return ""
        return f"{'packing' if self.board.packs else 'reading'} weights, {int(share * 4) * 25}%"

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started on this host, by rank; some may have ended."""
        return [process.pid for process in self._processes if isinstance(process, LocalRank)]

    def ask(self, rank: int, line: bytes) -> None:
        """Tells one rank something; one that does not read loses it."""
        if self._processes[rank].returncode is None:
            self._processes[rank].tell(line)

    def drain(self, grace: float = -1.0) -> None:
        """Has the leader finish what runs, for `grace` seconds (below 0: as set); the ring ends by itself then."""
        self._processes[0].tell(b"%s %g\n" % (DRAIN, grace))

    async def kill(self) -> None:
        """Ends every process and frees what the ring held. Safe to call twice.

        The ranks of a drained ring leave by themselves, in good order; only stragglers are killed.
        """
        self._killed = True
        if self._end.done() and self._end.result().kind == "drained":
            leaving = [asyncio.ensure_future(process.wait()) for process in self._processes]
            await asyncio.wait(leaving, timeout=LEAVE_TIMEOUT)
        for process in self._processes:
            process.kill()
        for rank, process in enumerate(self._processes):
            await _gone(rank, process)
        followers = [*self._events.values(), *self._exits]
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        if self._activity is not None and self._slot is not None:
            self._activity.give_back(self._slot)
            self._slot = None
        if self.directory.exists():
            shutil.rmtree(self.directory, ignore_errors=True)

    async def _spawn(self, rank: int) -> None:
        if rank < self._settings.ranks_here:
            threads = thread_count(self._settings)
            local = await self._host.start_rank(threads, self._settings, self._host.forks, self._variables)
            forked = isinstance(local.process, ForkedRank)
            log.info("rank_started", group=self._group, rank=rank, pid=local.pid, forked=forked, epoch=self.epoch)
            process: LocalRank | RemoteRank = local
        else:
            assert self._nodes is not None, "ranks elsewhere are started by their hosts"
            process = self._nodes.begin(rank, self.epoch, self.board)
        self._processes.append(process)
        process.tell(msgspec.json.encode(self._spec(rank)) + b"\n" + self._rendezvous)
        self._events[rank] = asyncio.create_task(self._follow_events(rank, process))
        self._exits.append(asyncio.create_task(self._follow_exit(rank, process)))
        if self._killed:  # while the process was being started
            process.kill()
            await process.wait()

    def _spec(self, rank: int) -> RankSpec:
        settings = self._settings.model_dump(mode="json", exclude=self._settings.unset)
        if rank == 0:  # the others speak to nobody but the ring
            settings["nats_password"] = self._settings.nats_password.get_secret_value()
        page = self._activity
        settings["ring_secret"] = "known" if self._settings.nnodes > 1 else ""
        return RankSpec(
            rank=rank,
            world_size=self._settings.tp,
            group=self._group,
            instance=self._host.instance,
            epoch=self.epoch,
            board=str(self.directory / "board"),
            settings=settings,
            activity=str(page.path) if rank == 0 and page is not None and self._slot is not None else "",
            activity_slot=self._slot or 0,
        )

    async def _follow_events(self, rank: int, process: LocalRank | RemoteRank) -> None:
        try:
            async for line in process.events:
                self._on_event(rank, _event_decoder.decode(line))
        finally:
            process.close()

    def _on_event(self, rank: int, event: RankEvent) -> None:
        match event:
            case Rendezvous():
                self._rendezvous = msgspec.json.encode(event) + b"\n"
                for follower in self._processes[1:]:
                    follower.tell(self._rendezvous)
            case Ready(model, kv_bytes, imports, kernels, streamed, traits):
                self.model, self.imports, self.kernels = model, imports, kernels
                self.kv_bytes = kv_bytes * self._settings.tp
                self.streamed = streamed and streamed.of_ranks(self._settings.tp)
                self.traits = traits
                self.ready.set()
            case AdaptersHeld(digests):
                self.adapters = digests
            case Requested() if self._activity is not None:
                self._activity.on_request()
            case Drained():
                self._finish(RingEnd("drained", "the group was drained"))
            case Failed(code, message, missed, cause):
                end = RingEnd("failed", message, code, cause)
                if missed:
                    self._missed = True
                    asyncio.get_running_loop().call_later(NAMING_PATIENCE, self._finish, end)
                else:
                    self._finish(end)

    async def _follow_exit(self, rank: int, process: LocalRank | RemoteRank) -> None:
        code = await process.wait()
        # What the rank said last may still be in the pipe, which ends with the process.
        await asyncio.wait({self._events[rank]}, timeout=LEAVE_TIMEOUT)
        if self._missed and code >= 0:
            return  # it has left by itself, as those do that miss another
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        where = f"process {process.pid}" if isinstance(process, LocalRank) else process.where
        cause = cause_of_exit(code, oom_kills() - self._oom_kills)
        self._finish(RingEnd("died", f"rank {rank} ({where}) ended with {how}", cause=cause))

    def _finish(self, end: RingEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)


async def _gone(rank: int, process: LocalRank | RemoteRank) -> None:
    """Waits for the end of a process that has been killed: until then it holds its GPU's memory."""
    ending = asyncio.ensure_future(process.wait())
    await asyncio.wait({ending}, timeout=KILL_PATIENCE)
    if not ending.done():
        reason = "it is stuck in the kernel, usually in a driver: look at dmesg; its GPU may need a reset"
        log.warning("rank_kill_timed_out", rank=rank, reason=reason)
    await ending

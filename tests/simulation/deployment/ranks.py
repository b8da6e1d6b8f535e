"""The rank of a simulated group: the product's leader with its stub engine, as a process of the world.

    supervisor (the product's) ──Family──▶ rank 0: Leader, StubRing, StubEngine; or EngineLeader ──Family──▶ engine
                 └── board, flight recorder: files, as in production

What no simulation has: further ranks (plans would go over sockets), hand-over of KV blocks (the stub has none), dumps
of ranks that hang. How long a rank takes to start is drawn.
"""

import asyncio
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.executor.core.engine import SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan
from services.executor.engines.leader import EngineLeader
from services.executor.ipc.board import RingBoard
from services.executor.ipc.plan_channel import PlanSender
from services.executor.ipc.rank_pipe import DRAIN, RankEvent, RankSpec
from services.executor.leader import group_leader
from services.executor.leader.leader import Leader
from services.executor.rank import failed, stub_settings
from services.executor.supervisor import group, ring
from services.executor.supervisor.ranks.rank_process import ForkClient, LocalRank
from services.executor.worker.stub import StubEngine, StubRing
from shared.messages.debugging import LeaderDump
from tests.simulation.core.processes import CURRENT, Host
from tests.simulation.core.world import World
from tests.simulation.deployment import engines
from tests.simulation.deployment.children import Child, Ended, Family, is_stopped, with_descendants

START = (0.3, 5.0)  # seconds until a rank has loaded its model, from and to
HANGS = 1e9  # seconds of a step that never ends
CRASH, EXIT = -11, 3  # codes with which `stub_fault` ends a rank: SIGSEGV, and an exit without a word


def stand_in() -> None:
    """For what executors ask their machine. Idempotent."""
    engines.stand_in()
    group.is_stopped = is_stopped  # type: ignore[attr-defined]
    group.with_descendants = with_descendants  # type: ignore[attr-defined]
    ring.oom_kills = lambda: 0  # type: ignore[attr-defined]
    group_leader.freeze_gc_after_startup = lambda: None  # type: ignore[attr-defined]


_directories: weakref.WeakKeyDictionary[World, tempfile.TemporaryDirectory[str]] = weakref.WeakKeyDictionary()


def directory_of(world: World, host: Host) -> Path:
    """Of the host's files, which survive its processes. What they leave behind goes with the world."""
    directory = _directories.get(world)
    if directory is None:
        tempfile.tempdir = None
        directory = _directories[world] = tempfile.TemporaryDirectory(prefix="ryzanstein-world-")
        tempfile.tempdir = directory.name
    path = Path(directory.name) / host.name
    path.mkdir(exist_ok=True)
    return path


class Pipe:
    """The rank's end of the pipe to its supervisor, as `SupervisorPipe`, without its thread."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.desk = self
        self._listening: asyncio.Task[None] | None = None

    def on_state(self, leader: Callable[[], LeaderDump | None]) -> None:
        """Nobody looks into a simulated rank."""

    def send(self, event: RankEvent) -> None:
        self._child.tell(msgspec.json.encode(event) + b"\n")

    def listen(self, drain: Callable[[float], object] = lambda grace: None) -> None:
        self._listening = asyncio.get_running_loop().create_task(self._listen(drain))

    async def _listen(self, drain: Callable[[float], object]) -> None:
        async for line in self._child.commands:
            if line.startswith(DRAIN):
                drain(float(line[len(DRAIN) :] or -1))
        self._child.exit(1)


class Alone:
    """Where a ring of one rank meets, as `PlanListener`."""

    host, port, secret = "127.0.0.1", 0, ""

    def accept(self, followers: int, timeout: float) -> PlanSender:
        return PlanSender([])


class TimedRing(StubRing):
    """A step is under way on its board for as long as it takes, though it is computed at once; what `stub_fault` does
    is done to the process of the world."""

    def __init__(self, child: Child, spec: RankSpec, settings: ExecutorSettings, board: RingBoard) -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._hung = False
        stub = StubEngine(stub_settings(settings, None), fail=self._fail)
        listener: Any = Alone()
        super().__init__(stub, spec, board, listener, lambda rendezvous: None)

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self._board.begin(plan.step)
        sampled = self._board.run(plan, lambda: self._stub.execute(plan, samples))
        if not self._hung:
            self._loop.call_later(self._stub.seconds(plan), self._board.end, plan.step)
        return sampled

    def _fail(self, fault: str) -> None:
        if fault == "error":
            raise MemoryError("the stub's fault")
        if fault == "hang":
            self._hung = True
            time.sleep(HANGS)
        else:
            self._child.exit(CRASH if fault == "crash" else EXIT)


async def lead(child: Child, start: float) -> int:
    """`services.executor.rank` in a process of the world; `start`: seconds until it has loaded. Its exit code."""
    spec = msgspec.json.decode(await child.commands.readline(), type=RankSpec)
    await asyncio.sleep(start)
    settings = ExecutorSettings.model_validate(spec.settings)
    board = RingBoard(Path(spec.board), spec.world_size)
    pipe: Any = Pipe(child)
    try:
        await _leader(child, settings, spec, board, pipe).run()
    except Exception as error:
        event = failed(error, f"Rank {spec.rank} of group {spec.group}")
        if settings.serving_engine:
            event = msgspec.structs.replace(event, missed=False)
        pipe.send(event)
        return 1
    return 0


def _leader(child: Child, settings: ExecutorSettings, spec: RankSpec, board: RingBoard, pipe: Any) -> Any:
    if settings.serving_engine:
        engine = engines.Engine(Family(child.world), settings)
        return EngineLeader(settings, spec, board, pipe, engine, Path(spec.board).parent)
    return Leader(settings, spec, board, TimedRing(child, spec, settings, board), pipe)


class Ranks:
    """Starts them, on the host of the supervisor in whose process it is made."""

    def __init__(self, family: Family) -> None:
        self._family = family
        process = CURRENT.get()
        self._draw = random.Random(f"{family.world.seed} {process.name} {family.world.now:.6f}")

    async def start(
        self, threads: int, settings: ExecutorSettings, forks: ForkClient | None, variables: Mapping[str, str]
    ) -> LocalRank:
        """As `LocalRank.start`."""
        start = self._draw.uniform(*START)
        child = self._family.start("rank", lambda child: lead(child, start))
        process: Any = child
        return LocalRank(process, child.stdin, child.events, Ended())

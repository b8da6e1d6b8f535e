"""The rank processes that `benchmarks.ring` measures: the executor's own ring, without its leader's queue.

Each ring is `world` processes of one thread. The parent tells rank 0 what to run; the others follow its
plans, as in service.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from services.executor.board import RingBoard
from services.executor.engine.plan import StepPlan
from services.executor.ring import SPIN_COUNT, RankSpec, Rendezvous
from services.executor.settings import ExecutorSettings
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from services.executor.model.collectives import Collectives

READY_TIMEOUT = 300.0
WARM_UP = 3


class Share(msgspec.Struct, frozen=True):
    """Of one rank's step time, what it spent in collectives, and what of that it waited for others."""

    communication: float
    waiting: float


class Timing(msgspec.Struct, frozen=True):
    """Of one kind of step on one ring."""

    milliseconds: float
    """Median."""
    tokens_per_second: float
    shares: list[Share]
    """One per rank."""


class BenchRing:
    """A ring of `world` processes of one thread that stay up until `close`."""

    def __init__(self, settings: dict[str, object], world: int) -> None:
        os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT=SPIN_COUNT)  # read when torch is imported
        context = multiprocessing.get_context("spawn")
        self._directory = TemporaryDirectory(prefix="ryzanstein-bench-")
        board = Path(self._directory.name, "board")
        RingBoard(board, world, create=True).close()
        self._times: SynchronizedArray[Any] = context.Array("d", 2 * world)
        self._world = world
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(world)), strict=True)
        self._processes = [
            context.Process(
                target=_rank,
                args=(settings, _spec(rank, world, board), theirs[rank], self._times),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()
        if world > 1:
            rendezvous = self._answer()
            for pipe in self._pipes[1:]:
                pipe.send(rendezvous)
        self._answer()

    def steps(self, plan: StepPlan, count: int) -> tuple[list[float], list[Share]]:
        """(seconds of each step, what each rank spent in collectives during them)."""
        self._pipes[0].send((plan, WARM_UP))
        self._answer()
        before = list(self._times)
        self._pipes[0].send((plan, count))
        seconds: list[float] = self._answer()
        after, total = list(self._times), sum(seconds)
        used = [(new - old) / total for new, old in zip(after, before, strict=True)]
        return seconds, [Share(*used[2 * rank : 2 * rank + 2]) for rank in range(self._world)]

    def reduce(self, elements: int, count: int) -> float:
        """Median seconds of a sum of `elements` bf16 values."""
        for pipe in self._pipes:
            pipe.send((elements, count))
        answers = [self._answer(rank) for rank in range(self._world)]
        return statistics.median(answers[0])

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._directory.cleanup()

    def _answer(self, rank: int = 0) -> Any:
        pipe = self._pipes[rank]
        waited = time.monotonic() + READY_TIMEOUT
        while not pipe.poll(0.2):
            dead = [process.exitcode for process in self._processes if process.exitcode not in (None, 0)]
            if dead or time.monotonic() > waited:
                raise SystemExit("error: a rank of the benchmark's ring has ended; its last words are above.")
        return pipe.recv()


def _spec(rank: int, world: int, board: Path) -> RankSpec:
    return RankSpec(rank, world, "bench", "bench", 1, str(board), {})


def _rank(
    values: dict[str, object], spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    import torch

    torch.set_num_threads(1)
    settings = ExecutorSettings.model_validate(
        values | {"tp": spec.world_size, "threads": 1, "kv_dtype": "bf16"}
    )
    if not settings.model:
        _reduce_only(settings, spec, pipe)
    elif spec.rank == 0:
        _lead(settings, spec, pipe, times)
    else:
        _follow(settings, spec, pipe, times)


def _member(settings: ExecutorSettings, spec: RankSpec, collectives: "Collectives") -> Any:
    import torch

    from services.executor.engine.ring_engine import RingMember

    board = RingBoard(Path(spec.board), spec.world_size).rank(spec.rank)
    device, directory = torch.device("cpu"), Path(settings.model)
    return RingMember.load(settings, spec, board, directory, device, collectives, lambda done, total: None)


def _lead(
    settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    import torch

    from services.executor.engine import meeting
    from services.executor.engine.sampling import Sampler
    from services.executor.engine.sampling_state import SamplingState

    sender, collectives = meeting.lead(settings, spec, torch.device("cpu"), Path(settings.model), pipe.send)
    runner, sampler = _member(settings, spec, collectives).runner, Sampler()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        plan, count = order
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            sender.send(plan)
            logits = runner.forward(plan)
            states = [SamplingState(SamplingParams(temperature=0), [1], []) for _ in range(logits.shape[0])]
            sampler.sample(logits, states)
            seconds.append(time.perf_counter() - began)
        _note(collectives, times)
        pipe.send(seconds)
    sender.close()


def _follow(
    settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    from services.executor.engine import meeting

    rendezvous: Rendezvous = pipe.recv()
    receiver, collectives = meeting.follow(settings, spec, rendezvous)
    runner = _member(settings, spec, collectives).runner
    while (plan := receiver.receive()) is not None:
        runner.forward(plan)
        _note(collectives, times)


def _note(collectives: "Collectives", times: "SynchronizedArray[Any]") -> None:
    from services.executor.model.collectives_shm import SharedMemory

    if isinstance(collectives, SharedMemory):
        at = 2 * collectives.rank
        times[at : at + 2] = [collectives.busy_seconds, collectives.waited_seconds]


def _reduce_only(settings: ExecutorSettings, spec: RankSpec, pipe: Connection) -> None:
    import torch

    from services.executor.engine import meeting

    collectives: Collectives
    if spec.rank == 0:
        _, collectives = meeting.lead(settings, spec, torch.device("cpu"), Path(), pipe.send)
        pipe.send("ready")
    else:
        _, collectives = meeting.follow(settings, spec, pipe.recv())
    while (order := pipe.recv()) is not None:
        elements, count = order
        pipe.send(_reduce_times(collectives, torch.zeros(elements, dtype=torch.bfloat16), count))


def _reduce_times(collectives: "Collectives", tensor: Any, count: int) -> Sequence[float]:
    seconds = []
    for _ in range(WARM_UP + count):
        began = time.perf_counter()
        collectives.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]

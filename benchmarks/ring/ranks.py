"""The rank processes that `benchmarks.ring` measures: the executor's own ring, without its leader's queue.

The parent tells rank 0 what to run; the others follow its plans, as in service.
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
from msgspec import structs

from benchmarks.engine.steps import Decode, Prefill
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.native.library import PARTS
from services.executor.supervisor.rank_process import SPIN_COUNT
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from services.executor.collectives.base import Collectives
    from services.executor.worker.runner import ModelRunner

READY_TIMEOUT = 300.0
WARM_UP = 3
_FIGURES = 2 + len(PARTS)
"""Of a rank, in seconds so far: in collectives, waiting there, and on each part of the native kernels."""


class Share(msgspec.Struct, frozen=True):
    """Of one rank's step time, what it spent in collectives, and what of that it waited for others."""

    communication: float
    waiting: float
    parts: dict[str, float] = {}
    """Milliseconds of a step that the native kernels spend on each part; none where PyTorch computes."""


class Timing(msgspec.Struct, frozen=True):
    """Of one kind of step on one ring."""

    milliseconds: float
    """Median."""
    tokens_per_second: float
    shares: list[Share]
    """One per rank."""


class BenchRing:
    """A ring of `world` processes of `threads` threads that stay up until `close`."""

    def __init__(self, settings: dict[str, object], world: int, threads: int = 1) -> None:
        os.environ.update(
            OMP_NUM_THREADS=str(threads), GOMP_SPINCOUNT=SPIN_COUNT
        )  # read when torch is imported
        settings = settings | {"tp": world, "threads": threads}
        context = multiprocessing.get_context("spawn")
        self._directory = TemporaryDirectory(prefix="ryzanstein-bench-")
        board = Path(self._directory.name, "board")
        RingBoard(board, world, create=True)
        self._times: SynchronizedArray[Any] = context.Array("d", _FIGURES * world)
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
        self._blocks: tuple[int, int] = self._answer()

    def begin(self, kind: Decode | Prefill) -> StepPlan:
        """The plan of the steps to measure; what they read has been computed."""
        steps = kind.steps(*self._blocks)
        for plan in steps.before:
            self._run(plan, 1)
        return steps.measured

    def steps(self, plan: StepPlan, count: int) -> tuple[list[float], list[Share]]:
        """(seconds of each step, what each rank spent during them)."""
        self._run(plan, WARM_UP)
        before = list(self._times)
        seconds = self._run(plan, count)
        used = [new - old for new, old in zip(list(self._times), before, strict=True)]
        ranks = [used[_FIGURES * rank : _FIGURES * (rank + 1)] for rank in range(self._world)]
        return seconds, [_share(rank, sum(seconds), count) for rank in ranks]

    def _run(self, plan: StepPlan, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        self._pipes[0].send((plan, count))
        seconds: list[float] = self._answer()
        return seconds

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


def _share(used: Sequence[float], seconds: float, count: int) -> Share:
    """Of one rank's figures over `count` steps that took `seconds`."""
    busy, waited, *parts = used
    by_part = {part: spent / count * 1e3 for part, spent in zip(PARTS, parts, strict=True)}
    return Share(busy / seconds, waited / seconds, by_part if any(parts) else {})


def _spec(rank: int, world: int, board: Path) -> RankSpec:
    return RankSpec(rank, world, "bench", "bench", 1, str(board), {})


def _rank(
    values: dict[str, object], spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    import torch

    settings = ExecutorSettings.model_validate(values)
    torch.set_num_threads(settings.threads)
    if not settings.model:
        _reduce_only(settings, spec, pipe)
    elif spec.rank == 0:
        _lead(settings, spec, pipe, times)
    else:
        _follow(settings, spec, pipe, times)


def _member(settings: ExecutorSettings, spec: RankSpec, collectives: "Collectives") -> Any:
    import torch

    from services.executor.worker.engine import RingMember

    board = RingBoard(Path(spec.board), spec.world_size).rank(spec.rank)
    device, directory = torch.device("cpu"), Path(settings.model)
    return RingMember.load(settings, spec, board, directory, device, collectives, lambda done, total: None)


def _lead(
    settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    import torch

    from services.executor.core.sampling_state import SamplingState
    from services.executor.sampling.sampler import Sampler, wants_of
    from services.executor.worker import rendezvous as meeting

    sender, collectives = meeting.lead(settings, spec, torch.device("cpu"), Path(settings.model), pipe.send)
    member, sampler = _member(settings, spec, collectives), Sampler()
    runner, blocks = member.runner, member.engine_spec
    pipe.send((blocks.num_blocks, blocks.num_cold))
    while (order := pipe.recv()) is not None:
        plan, count = order
        rows = len(plan.sample_rows) // 4
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            states = [SamplingState(SamplingParams(temperature=0), [1], []) for _ in range(rows)]
            wants = wants_of(states, runner.vocab_size).tobytes()
            wanting = structs.replace(plan, candidates=wants)
            sender.send(wanting)
            logits = runner.forward(wanting)
            if states:
                assert logits is not None, "rank 0 gets the logits"
                sampler.sample(logits, states)
            seconds.append(time.perf_counter() - began)
        _note(runner, collectives, times)
        pipe.send(seconds)
    sender.close()


def _follow(
    settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]"
) -> None:
    import torch

    from services.executor.worker import rendezvous as meeting

    rendezvous: Rendezvous = pipe.recv()
    receiver, collectives = meeting.follow(settings, spec, rendezvous, torch.device("cpu"))
    runner = _member(settings, spec, collectives).runner
    while (plan := receiver.receive()) is not None:
        runner.forward(plan)
        _note(runner, collectives, times)


def _note(runner: "ModelRunner", collectives: "Collectives", times: "SynchronizedArray[Any]") -> None:
    from services.executor.collectives.shared_memory import SharedMemory

    figures = [0.0] * _FIGURES
    if isinstance(collectives, SharedMemory):
        figures[:2] = [collectives.busy_seconds, collectives.waited_seconds]
    if runner.is_native:
        figures[2:] = runner.spent().values()
    times[_FIGURES * collectives.rank : _FIGURES * (collectives.rank + 1)] = figures


def _reduce_only(settings: ExecutorSettings, spec: RankSpec, pipe: Connection) -> None:
    import torch

    from services.executor.worker import rendezvous as meeting

    collectives: Collectives
    if spec.rank == 0:
        _, collectives = meeting.lead(settings, spec, torch.device("cpu"), Path(), pipe.send)
        pipe.send("ready")
    else:
        _, collectives = meeting.follow(settings, spec, pipe.recv(), torch.device("cpu"))
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

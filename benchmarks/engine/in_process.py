"""A ring of one rank in this process, as the executor has it, and a batcher that is driven as its leader drives it,
without HTTP and NATS."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.executor.core.engine import SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest, SamplingParams, TokenEntry

if TYPE_CHECKING:
    from benchmarks.serve.workloads import Workload
    from services.executor.core.settings import ExecutorSettings
    from services.executor.worker.engine import RingEngine

Execute = Callable[[StepPlan, Sequence[SamplingState]], list[SampledToken]]  # computes and samples one step


def set_threads(threads: int) -> None:
    """OpenMP reads its settings when torch is imported; they are the executor's."""
    from services.executor.supervisor.ranks.early_fork_server import RUNTIME

    os.environ.setdefault("GOMP_SPINCOUNT", RUNTIME["GOMP_SPINCOUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def ring_in(directory: Path, settings: "ExecutorSettings") -> "RingEngine":
    """Not loaded yet; its board is in `directory`."""
    from services.executor.worker.engine import RingEngine

    board = directory / "board"
    spec = RankSpec(0, 1, "benchmark", "benchmark", 1, str(board), {})
    return RingEngine(settings, spec, RingBoard(board, 1, create=True), lambda rendezvous: None)


@dataclass(frozen=True)
class Step:
    """One, with the times at which it was planned, computed and its tokens were taken."""

    plan: StepPlan
    entries: list[TokenEntry]
    began: float
    planned: float
    computed: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def take_step(batcher: Scheduler, execute: Execute) -> Step:
    """What a leader does for a step."""
    began = time.perf_counter()
    scheduled = batcher.schedule(began)
    assert scheduled is not None, "there is work"
    plan, rows = scheduled
    planned = time.perf_counter()
    sampled = execute(plan, [row.sampling for row in rows])
    computed = time.perf_counter()
    entries = [entry for batch in batcher.update(sampled, computed - planned).values() for entry in batch]
    return Step(plan, entries, began, planned, computed, time.perf_counter())


def steps_of(batcher: Scheduler, execute: Execute) -> Iterator[Step]:
    """Until nothing is left to do."""
    while batcher.has_work:
        yield take_step(batcher, execute)


def make_execute(runner: Any, sampler: Any) -> Execute:
    """Of a model's runner without a ring around."""
    from msgspec import structs

    from services.executor.sampling.sampler import wants_of

    def execute(plan: StepPlan, states: Sequence[SamplingState]) -> list[SampledToken]:
        wants = wants_of(states, runner.vocab_size).tobytes()
        logits = runner.forward(structs.replace(plan, candidates=wants))
        sampled: list[SampledToken] = sampler.sample(logits, states) if states else []
        return sampled

    return execute


class InProcess:
    """One rank of a ring and its batcher, as the leader has them, which are given closed loops of greedy requests."""

    def __init__(self, directory: Path, scratch: Path, threads: int) -> None:
        from services.executor.core.settings import ExecutorSettings
        from shared.config import load_settings

        settings = load_settings(ExecutorSettings, model=str(directory), threads=threads)
        self._engine = ring_in(scratch, settings)
        self._spec = self._engine.load(lambda done, total: None)
        self._limits = BatchSettings(settings.max_batch_tokens, settings.max_sequences, max_drafts=0)
        self._random = random.Random(1)

    def rate(self, workload: "Workload") -> float:
        """Output tokens/s of so many clients."""
        batcher = Scheduler(self._spec, self._limits, "benchmark")
        left, free, tokens, began = workload.requests, workload.clients, 0, time.perf_counter()
        while True:
            for _ in range(min(free, left)):
                batcher.add(self._request(workload, left))
                left -= 1
            if not batcher.has_work:
                return tokens / (time.perf_counter() - began)
            entries = take_step(batcher, self._engine.execute).entries
            tokens += sum(len(entry.tokens) for entry in entries)
            free = sum(bool(entry.finish) for entry in entries)

    def _request(self, workload: "Workload", number: int) -> GenerationRequest:
        prompt = [self._random.randrange(100, self._spec.vocab_size) for _ in range(workload.prompt_tokens)]
        greedy = SamplingParams(temperature=0)
        return GenerationRequest(str(number), "r", "m", "c", prompt, workload.output_tokens, greedy)

"""What planning costs a step: `python -m benchmarks.engine.bookkeeping --help`.

The real batcher, block tables and plans, with an engine that answers at once. Each workload runs to its end:
admissions, prefill chunks, decodes, sealed blocks and endings are all in the mean.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, NamedTuple

import typer

from benchmarks.engine.in_process import take_step
from benchmarks.harness import Rounds, Sheet, nearest, run, show
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.step_plan import StepPlan, encode_plan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest, SamplingParams

VOCABULARY = 50_000
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """A closed loop of `clients` requests at a time."""

    name: str
    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    step_ms: float  # what a step of this workload takes with SmolLM2-135M on two cores


CASES = (Case("W2", 16, 48, 256, 128, 20.0), Case("W3", 64, 128, 64, 64, 40.0))


class StepTimes(NamedTuple):
    """Nanoseconds of a step."""

    schedule: float
    update: float


def run_case(case: Case, spec: EngineSpec, seed: int = 0) -> list[StepTimes]:
    """One run of a workload, every step timed."""
    batcher = Scheduler(spec, BatchSettings(session_ttl=900.0), "benchmark")
    waiting, times = _requests(case, seed), list[StepTimes]()
    answers = [SampledToken(7 + n % 11) for n in range(case.clients)]
    ended, sent = case.clients, 0.0

    def execute(plan: StepPlan, rows: Sequence[object]) -> list[SampledToken]:
        """Of an engine that answers at once; a ring of more than one rank sends the plan."""
        nonlocal sent
        began = time.perf_counter()
        encode_plan(plan)
        sent = time.perf_counter() - began
        return answers[: len(rows)]

    while True:
        for request in islice(waiting, ended):
            batcher.add(request)
        if not batcher.has_work:
            return times
        step = take_step(batcher, execute)
        began = time.perf_counter()
        batcher.load()
        after = time.perf_counter() - began
        planned, updated = step.planned - step.began + sent, step.ended - step.computed + after
        times.append(StepTimes(planned * 1e9, updated * 1e9))
        ended = sum(bool(entry.finish) for entry in step.entries)


def _requests(case: Case, seed: int) -> Iterator[GenerationRequest]:
    rng = random.Random(seed)
    for number in range(case.requests):
        prompt = [rng.randrange(VOCABULARY) for _ in range(case.prompt_tokens)]
        sampling, tokens = SamplingParams(temperature=0.0), case.output_tokens
        yield GenerationRequest(str(number), "r", "m", "gateway", prompt, tokens, sampling, session=str(number))


def main(
    rounds: Rounds = 5,
    quantized: Annotated[int, typer.Option(help="Quantized blocks (compressed KV cache); 0: none.")] = 0,
    spill: Annotated[int, typer.Option(help="Spill slots; 0: none.")] = 0,
    blocks: Annotated[int, typer.Option(help="Writable blocks; few of them cause evictions.", min=16)] = 4096,
) -> None:
    """Microseconds of planning per step."""
    spec = EngineSpec(BLOCK, blocks, 8192, VOCABULARY, num_quantized=quantized, num_host=spill)
    rows = []
    for case in CASES:
        times = min((run_case(case, spec, seed) for seed in range(rounds)), key=lambda times: sum(map(sum, times)))
        total = [sum(each) / 1e3 for each in times]
        schedule, update = (statistics.mean(column) / 1e3 for column in zip(*times, strict=True))
        mean = statistics.mean(total)
        figures = (f"{one:.0f}" for one in (schedule, update, mean, nearest(total, 0.99), case.step_ms))
        rows.append((case.name, case.clients, len(total), *figures, f"{mean / case.step_ms / 10:.2f}%"))
    head = ("workload", "at once", "steps", "plan us", "result us", "mean us", "p99 us", "step ms", "share")
    show(Sheet(head, rows))


if __name__ == "__main__":
    run(main)

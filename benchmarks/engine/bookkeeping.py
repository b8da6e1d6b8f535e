"""What planning costs a step: `python -m benchmarks.engine.bookkeeping --help`.

The real batcher, block tables and plans, with an engine that answers at once. Each workload runs to its end:
admissions, prefill chunks, decodes, sealed blocks and endings are all in the mean.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.step_plan import StepPlan, encode_plan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
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
    step_ms: float
    """What a step of this workload takes with SmolLM2-135M on two cores."""


CASES = (Case("W2", 16, 48, 256, 128, 20.0), Case("W3", 64, 128, 64, 64, 40.0))


@dataclass
class StepTimes:
    """Nanoseconds of each step."""

    schedule: list[int]
    update: list[int]

    @property
    def total(self) -> list[int]:
        return [sum(pair) for pair in zip(self.schedule, self.update, strict=True)]


def run(case: Case, spec: EngineSpec, seed: int = 0) -> StepTimes:
    """One run of a workload, every step timed."""
    batcher = ContinuousBatcher(spec, BatchSettings(session_ttl=900.0), "benchmark")
    waiting, times = _requests(case, seed), StepTimes([], [])
    answers = [SampledToken(7 + n % 11) for n in range(case.clients)]
    ended = case.clients
    while True:
        for request in islice(waiting, ended):
            batcher.add(request)
        if not batcher.has_work:
            return times
        ended = step(batcher, answers, times)


def step(batcher: ContinuousBatcher, answers: list[SampledToken], times: StepTimes) -> int:
    """What a leader does around each step; how many requests ended."""
    began = time.perf_counter_ns()
    scheduled = batcher.schedule(began / 1e9)
    assert scheduled is not None
    plan, sequences = scheduled
    _send(plan)
    planned = time.perf_counter_ns()
    entries = batcher.update(answers[: len(sequences)])
    batcher.load()
    times.schedule.append(planned - began)
    times.update.append(time.perf_counter_ns() - planned)
    return sum(1 for batch in entries.values() for entry in batch if entry.finish)


def _send(plan: StepPlan) -> bytes:
    """What a ring of more than one rank does with a plan."""
    return encode_plan(plan)


def _requests(case: Case, seed: int) -> Iterator[GenerationRequest]:
    rng = random.Random(seed)
    for number in range(case.requests):
        prompt = [rng.randrange(VOCABULARY) for _ in range(case.prompt_tokens)]
        yield GenerationRequest(
            str(number),
            "r",
            "m",
            "gateway",
            prompt,
            case.output_tokens,
            SamplingParams(temperature=0.0),
            session=str(number),
        )


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each workload; the best counts.", min=1)] = 5,
    cold: Annotated[int, typer.Option(help="Cold blocks (compressed KV cache); 0: none.")] = 0,
    spill: Annotated[int, typer.Option(help="Spill slots; 0: none.")] = 0,
    blocks: Annotated[int, typer.Option(help="Hot blocks; few of them cause evictions.", min=16)] = 4096,
) -> None:
    """Microseconds of planning per step."""
    spec = EngineSpec(BLOCK, blocks, 8192, VOCABULARY, num_cold=cold, num_host=spill)
    table = Table(
        "workload", "at once", "steps", "plan us", "result us", "mean us", "p99 us", "step ms", "share"
    )
    for case in CASES:
        times = min((run(case, spec, seed) for seed in range(rounds)), key=lambda times: sum(times.total))
        total = sorted(times.total)
        mean = statistics.mean(total) / 1e3
        table.add_row(
            case.name,
            str(case.clients),
            str(len(total)),
            f"{statistics.mean(times.schedule) / 1e3:.0f}",
            f"{statistics.mean(times.update) / 1e3:.0f}",
            f"{mean:.0f}",
            f"{total[int(len(total) * 0.99)] / 1e3:.0f}",
            f"{case.step_ms:.0f}",
            f"{mean / case.step_ms / 10:.2f}%",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

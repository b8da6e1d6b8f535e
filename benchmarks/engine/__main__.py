"""Step times of the engine alone, in this process: `python -m benchmarks.engine --help`.

What HTTP, NATS and the batcher cost is the difference to `benchmarks.serve`. One rank, no ring; greedy.
With --profile it prints where a step's time goes: by part for the native kernels, by operator for PyTorch, which
computes where RYZANSTEIN_NATIVE_KERNELS=0.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import Decode, Prefill, Steps, load_one_rank
from services.executor.core.step_plan import StepPlan
from shared.messages import SamplingParams

DECODES = ((1, 128), (8, 128), (16, 320), (64, 100))
"""(sequences, tokens in each one's context)"""
PREFILLS = (64, 256, 512)
"""Tokens of one prompt."""
BLOCKS = 4096


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of `work`, after three rounds that do not count."""
    times = []
    for round_ in range(rounds + 3):
        began = time.perf_counter()
        work()
        if round_ >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


@dataclass(frozen=True)
class Stepper:
    """Runs one step: forward and greedy sampling."""

    step: Callable[[StepPlan], object]
    spent: Callable[[], dict[str, float]] | None
    """Seconds that the native kernels have spent on each part so far; None: PyTorch computes."""

    def prepare(self, steps: Steps) -> None:
        """Computes what the measured step reads."""
        for plan in steps.before:
            self.step(plan)


def make_step(directory: Path, dtype_name: str, threads: int) -> Stepper:
    runner, _ = load_one_rank(directory, dtype_name, threads, BLOCKS)
    # Only now: torch must find its settings when it is imported.
    from services.executor.core.sampling_state import SamplingState
    from services.executor.sampling.sampler import Sampler, wants_of

    sampler = Sampler()

    def step(plan: StepPlan) -> object:
        rows = len(plan.sample_rows) // 4
        states = [SamplingState(SamplingParams(temperature=0), [1], []) for _ in range(rows)]
        wants = wants_of(states, runner.vocab_size).tobytes()
        logits = runner.forward(structs.replace(plan, candidates=wants))
        if not rows:
            return None
        assert logits is not None
        return sampler.sample(logits, states)

    return Stepper(step, runner.spent if runner.is_native else None)


def print_parts(stepper: Stepper, plans: Mapping[str, Steps], rounds: int) -> None:
    """Milliseconds of each part of the native kernels' steps."""
    assert stepper.spent is not None
    columns: dict[str, dict[str, float]] = {}
    for name, steps in plans.items():
        stepper.prepare(steps)
        before = stepper.spent()
        for _ in range(rounds):
            stepper.step(steps.measured)
        after = stepper.spent()
        columns[name] = {part: (after[part] - before[part]) / rounds * 1e3 for part in after}
    table = Table("ms", *columns)
    for part in stepper.spent():
        table.add_row(part, *(f"{column[part]:.2f}" for column in columns.values()))
    table.add_row("all", *(f"{sum(column.values()):.2f}" for column in columns.values()))
    Console().print(table)


def print_profile(step: Callable[[StepPlan], object], plan: StepPlan, name: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step(plan)
    print(f"\n{name}, 5 steps")
    print(
        profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=44)
    )


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Steps to take the median of.", min=1)] = 20,
    profile: Annotated[bool, typer.Option(help="Also print where the time goes.")] = False,
) -> None:
    """Step times of the engine alone."""
    stepper = make_step(model, dtype, threads)
    plans = {
        f"decode, {n} sequences of {context}": Decode(n, context).steps(BLOCKS, 0) for n, context in DECODES
    }
    plans |= {f"prefill, {tokens} tokens": Prefill(tokens).steps(BLOCKS, 0) for tokens in PREFILLS}
    table = Table("step", "ms", "tokens/s")
    for name, steps in plans.items():
        stepper.prepare(steps)
        plan = steps.measured
        taken = milliseconds(lambda plan=plan: stepper.step(plan), rounds)  # type: ignore[misc]
        table.add_row(name, f"{taken:.1f}", f"{len(plan.token_ids) // 4 / taken * 1e3:.0f}")
    Console().print(table)
    if profile and stepper.spent is not None:
        print_parts(stepper, plans, rounds)
    elif profile:
        for name in (next(iter(plans)), f"decode, {DECODES[-1][0]} sequences of {DECODES[-1][1]}"):
            stepper.prepare(plans[name])
            print_profile(stepper.step, plans[name].measured, name)


if __name__ == "__main__":
    typer.run(main)

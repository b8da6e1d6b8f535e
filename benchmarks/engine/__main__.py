"""Step times of the engine alone, in this process: `python -m benchmarks.engine --help`.

What HTTP, NATS and the batcher cost is the difference to `benchmarks.serve`. One rank, no ring; greedy.
With --profile it prints where a step's time goes in the native kernels. PyTorch computes where
RYZANSTEIN_NATIVE_KERNELS=0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engine.in_process import make_execute
from benchmarks.engine.steps import Decode, Prefill, Steps, load_one_rank
from benchmarks.harness import CORES, Dtype, ModelDirectory, Rounds, Sheet, Threads, milliseconds, run, show
from services.executor.core.step_plan import StepPlan
from shared.messages import SamplingParams

DECODES = ((1, 128), (8, 128), (16, 320), (64, 100))  # (sequences, tokens in each one's context)
PREFILLS = (64, 256, 512)  # tokens of one prompt
BLOCKS = 4096


@dataclass(frozen=True)
class Stepper:
    """Runs one step: forward and greedy sampling."""

    step: Callable[[StepPlan], object]
    # Seconds that the native kernels have spent on each part so far; None: PyTorch computes.
    spent: Callable[[], dict[str, float]] | None

    def prepare(self, steps: Steps) -> None:
        """Computes what the measured step reads."""
        for plan in steps.before:
            self.step(plan)


def make_step(directory: Path, dtype_name: str, threads: int) -> Stepper:
    runner, _ = load_one_rank(directory, dtype_name, threads, BLOCKS)
    # Only now: torch must find its settings when it is imported.
    from services.executor.core.sampling_state import SamplingState
    from services.executor.sampling.sampler import Sampler

    execute = make_execute(runner, Sampler())

    def step(plan: StepPlan) -> object:
        greedy = SamplingParams(temperature=0)
        return execute(plan, [SamplingState(greedy, [1], []) for _ in range(len(plan.sample_rows) // 4)])

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
    parts = [(part, *(f"{column[part]:.2f}" for column in columns.values())) for part in stepper.spent()]
    whole = ("all", *(f"{sum(column.values()):.2f}" for column in columns.values()))
    show(Sheet(["ms", *columns], [*parts, whole]))


def main(
    model: ModelDirectory,
    dtype: Dtype = "bf16",
    threads: Threads = CORES,
    rounds: Rounds = 20,
    profile: Annotated[bool, typer.Option(help="Also print where the time goes.")] = False,
) -> None:
    """Step times of the engine alone."""
    stepper = make_step(model, dtype, threads)
    plans = {f"decode, {n} sequences of {context}": Decode(n, context).steps(BLOCKS, 0) for n, context in DECODES}
    plans |= {f"prefill, {tokens} tokens": Prefill(tokens).steps(BLOCKS, 0) for tokens in PREFILLS}
    rows = []
    for name, steps in plans.items():
        stepper.prepare(steps)
        taken = milliseconds(partial(stepper.step, steps.measured), rounds)
        rows.append((name, f"{taken:.1f}", f"{len(steps.measured.token_ids) // 4 / taken * 1e3:.0f}"))
    show(Sheet(("step", "ms", "tokens/s"), rows))
    if profile and stepper.spent is not None:
        print_parts(stepper, plans, rounds)


if __name__ == "__main__":
    run(main)

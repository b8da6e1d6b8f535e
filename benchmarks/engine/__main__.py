"""Step times of the engine alone, in this process: `python -m benchmarks.engine --help`.

What HTTP, NATS and the batcher cost is the difference to `benchmarks.serve`. One rank, no ring; greedy, and what
sampling adds to decodes. With --profile it prints where a step's time goes in the native kernels. PyTorch computes
where RYZANSTEIN_NATIVE_KERNELS=0.
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
TURN = (160, 960)  # tokens of a later turn's prompt, and those that are cached before them
GREEDY = SamplingParams(temperature=0)
SAMPLED = (
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_p=0.95),
    SamplingParams(seed=1, temperature=0.7, top_p=0.9),
    SamplingParams(seed=1, temperature=0.8, top_k=40, top_p=0.9),
)
BLOCKS = 4096


@dataclass(frozen=True)
class Stepper:
    """Runs one step: forward and sampling, all rows alike."""

    step: Callable[[StepPlan, SamplingParams], object]
    # Seconds that the native kernels have spent on each part so far; None: PyTorch computes.
    spent: Callable[[], dict[str, float]] | None

    def prepare(self, steps: Steps) -> None:
        """Computes what the measured step reads."""
        for plan in steps.before:
            self.step(plan, GREEDY)


def make_step(directory: Path, dtype_name: str, threads: int) -> Stepper:
    runner, _ = load_one_rank(directory, dtype_name, threads, BLOCKS)
    # Only now: torch must find its settings when it is imported.
    from services.executor.core.sampling_state import SamplingState
    from services.executor.sampling.sampler import Sampler

    execute = make_execute(runner, Sampler(runner.rows))

    def step(plan: StepPlan, params: SamplingParams) -> object:
        return execute(plan, [SamplingState(params, [1], []) for _ in range(len(plan.sample_rows) // 4)])

    return Stepper(step, runner.spent if runner.is_native else None)


def print_parts(stepper: Stepper, plans: Mapping[str, Steps], rounds: int) -> None:
    """Milliseconds of each part of the native kernels' steps."""
    assert stepper.spent is not None
    columns: dict[str, dict[str, float]] = {}
    for name, steps in plans.items():
        stepper.prepare(steps)
        before = stepper.spent()
        for _ in range(rounds):
            stepper.step(steps.measured, GREEDY)
        after = stepper.spent()
        columns[name] = {part: (after[part] - before[part]) / rounds * 1e3 for part in after}
    parts = [(part, *(f"{column[part]:.2f}" for column in columns.values())) for part in stepper.spent()]
    whole = ("all", *(f"{sum(column.values()):.2f}" for column in columns.values()))
    show(Sheet(["ms", *columns], [*parts, whole]))


def print_sampled(stepper: Stepper, plans: Mapping[str, Steps], rounds: int) -> None:
    """Milliseconds of decodes whose rows are drawn, and what share of greedy ones that is; each beside those."""
    rows = []
    for name, steps in plans.items():
        stepper.prepare(steps)
        for params in SAMPLED:
            greedy, drawn = (
                milliseconds(partial(stepper.step, steps.measured, each), rounds) for each in (GREEDY, params)
            )
            told = f"temperature {params.temperature:g}, top-p {params.top_p:g}, top-k {params.top_k}"
            rows.append((name, told, f"{drawn:.1f}", f"{drawn / greedy:.2f}"))
    show(Sheet(("step", "sampling", "ms", "of greedy"), rows))


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
    plans |= {f"prefill, {tokens} tokens": Prefill(tokens).steps(BLOCKS, 0) for tokens in (*PREFILLS, TURN[0])}
    plans["turn, {} tokens after {}".format(*TURN)] = Prefill(*TURN).steps(BLOCKS, 0)
    rows = []
    for name, steps in plans.items():
        stepper.prepare(steps)
        taken = milliseconds(partial(stepper.step, steps.measured, GREEDY), rounds)
        rows.append((name, f"{taken:.1f}", f"{len(steps.measured.token_ids) // 4 / taken * 1e3:.0f}"))
    show(Sheet(("step", "ms", "tokens/s"), rows))
    print_sampled(stepper, {name: plans[name] for name in list(plans)[: len(DECODES)]}, rounds)
    if profile and stepper.spent is not None:
        print_parts(stepper, plans, rounds)


if __name__ == "__main__":
    run(main)

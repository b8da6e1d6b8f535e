"""What compressed KV blocks cost a decode step: `python -m benchmarks.engine.kv_decode --help`.

The same step, with all full blocks kept as the model computes them, as int8 and as fp8; the three take turns,
so that a noisy machine troubles them alike.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import BLOCK, decode_plan, load_one_rank
from services.executor.core.settings import BlockDType
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes

KINDS: tuple[BlockDType, ...] = ("bf16", "int8", "fp8")
SHAPES = ((1, 1024), (8, 128), (8, 1024), (16, 320), (8, 4096))
"""(sequences, tokens in each one's context)"""


def compressed(plan: StepPlan, num_hot: int) -> StepPlan:
    """`plan`, whose full blocks are cold: block b becomes `num_hot` + b. Each sequence's last one stays hot."""
    contexts = as_int32(plan.context_lens)
    ends = np.cumsum(-(-contexts // BLOCK)) - 1
    tables = as_int32(plan.block_tables) + num_hot
    tables[ends] -= num_hot
    return structs.replace(plan, block_tables=to_bytes(tables))


def make_step(
    directory: Path, kind: BlockDType, threads: int, num_blocks: int
) -> Callable[[StepPlan], object]:
    """A function that runs a step over blocks of random content."""
    runner, store = load_one_rank(directory, "bf16", threads, num_blocks, kind)
    for layer in range(store.shape.num_layers):
        store.hot(layer).normal_()
    if kind != "bf16":
        store.compress([[block, num_blocks + block] for block in range(num_blocks)])

    def step(plan: StepPlan) -> object:
        return runner.forward(plan if kind == "bf16" else compressed(plan, num_blocks))

    return step


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Steps to take the median of.", min=1)] = 15,
) -> None:
    """What compressed KV blocks cost a decode step."""
    num_blocks = max(sequences * -(-context // BLOCK) for sequences, context in SHAPES)
    steps = {kind: make_step(model, kind, threads, num_blocks) for kind in KINDS}
    table = Table("decode step", *(f"{kind}, ms" for kind in KINDS), "int8 / bf16", "fp8 / bf16")
    for sequences, context in SHAPES:
        plan = decode_plan(sequences, context)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round_ in range(rounds + 2):
            for kind, step in steps.items():
                began = time.perf_counter()
                step(plan)
                if round_ >= 2:
                    times[kind].append((time.perf_counter() - began) * 1e3)
        medians = {kind: statistics.median(taken) for kind, taken in times.items()}
        ratios = [f"{medians[kind] / medians['bf16']:.2f}" for kind in KINDS[1:]]
        table.add_row(
            f"{sequences} sequences of {context}", *(f"{medians[kind]:.1f}" for kind in KINDS), *ratios
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

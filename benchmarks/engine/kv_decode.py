"""What KV blocks cost a decode step: `python -m benchmarks.engine.kv_decode --help`.

The same step, with all full blocks kept as the model computes them, as int8 and as fp8; the three take turns,
so that a noisy machine troubles them alike. With `--sparse` one sequence of up to 128k tokens over int8 blocks of
random content, dense and with sparse attention in turns: what all of its keys and values cost against some of them, and
how near the dense step's attention comes to the rate of memory, which is measured in turns with them.
"""

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from msgspec import structs

from benchmarks.engine.steps import BLOCK, decode_plan, fill_quantized, load_one_rank
from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, median, run, show, timed
from benchmarks.random_model import LlamaShape, write_checkpoint
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from shared.data_types import BlockDType
from shared.messages import SparseAttention

KINDS: tuple[BlockDType, ...] = ("bf16", "int8", "fp8")
SHAPES = ((1, 1024), (8, 128), (8, 1024), (16, 320), (8, 4096))  # (sequences, tokens in each one's context)
LENGTHS = "8192,16384,32768,65536,131072"
# Whose int8 keys and values of 64k tokens take as many bytes as the weights that a step reads.
SHAPE = "1024,16,4,3968,16,32000"
_MB = 1e6


def compressed(plan: StepPlan, num_writable: int) -> StepPlan:
    """`plan`, whose full blocks are quantized: block b becomes `num_writable` + b. Each sequence's last one stays
    writable."""
    contexts = as_int32(plan.context_lens)
    ends = np.cumsum(-(-contexts // BLOCK)) - 1
    tables = as_int32(plan.block_tables) + num_writable
    tables[ends] -= num_writable
    return structs.replace(plan, block_tables=to_bytes(tables))


def make_step(directory: Path, kind: BlockDType, threads: int, num_blocks: int) -> Callable[[StepPlan], object]:
    """A function that runs a step over blocks of random content."""
    runner, store = load_one_rank(directory, "bf16", threads, num_blocks, kind)
    for layer in range(store.shape.num_layers):
        store.writable(layer).normal_()
    if kind != "bf16":
        store.compress([[block, num_blocks + block] for block in range(num_blocks)])

    def step(plan: StepPlan) -> object:
        return runner.forward(plan if kind == "bf16" else compressed(plan, num_blocks))

    return step


class Long:
    """Steps of one sequence over int8 blocks of random content, up to `longest` tokens."""

    def __init__(self, directory: Path, threads: int, longest: int, sparse: SparseAttention) -> None:
        self._blocks = -(-longest // BLOCK)
        self._sparse = to_bytes(list(SparsePattern.of(sparse)))
        self.runner, self.store = load_one_rank(directory, "bf16", threads, self._blocks, "int8", summaries=True)
        fill_quantized(self.store)

    @property
    def weights(self) -> int:
        """Bytes of them that a step reads."""
        packed = self.runner.packed
        assert packed is not None, "the native kernels compute it"
        return packed.head.nbytes + sum(linear.nbytes for layer in packed.layers for linear in layer.linears)

    def kv(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        shape = self.store.shape
        pages = [at for at, page in enumerate(shape.pages) if not page.summary]
        return sum(shape.quantized_bytes(page) for page in pages) * (tokens // BLOCK)

    def steps(self, context: int) -> dict[str, Callable[[], tuple[float, float]]]:
        """Each returns the milliseconds of a step, and of its attention."""
        dense = compressed(decode_plan(1, context), self._blocks)

        def step(plan: StepPlan) -> tuple[float, float]:
            before = self.runner.spent()["attend"]
            took = timed(lambda: self.runner.forward(plan))()
            return took * 1e3, (self.runner.spent()["attend"] - before) * 1e3

        sparse = structs.replace(dense, sparse=self._sparse)
        return {"dense": lambda: step(dense), "sparse": lambda: step(sparse)}


def long_contexts(long: Long, lengths: list[int], rounds: int) -> Sheet:
    """Dense and sparse decode steps in turns, the medians."""
    import torch

    large, rows = torch.ones(1 << 27), []  # half a gigabyte: memory's rate
    for context in lengths:
        work = {**long.steps(context), "memory": lambda: (large.nbytes / timed(large.sum)() / 1e9, 0.0)}
        taken = in_turns(work, rounds, warm_up=1)
        (dense, attend), (sparse, _), (memory, _) = (median(taken[name]) for name in work)
        rate = long.kv(context) / attend / 1e6
        figures = (f"{one:.1f}" for one in (attend, rate, memory))
        times = (f"{long.kv(context) / _MB:.0f}", f"{dense:.1f}", f"{sparse:.1f}", f"{dense / sparse:.2f}")
        rows.append((f"{context:,}", *times, *figures, f"{rate / memory:.0%}"))
    head = (
        *("tokens", "KV, MB", "dense, ms", "sparse, ms", "times as fast", "dense attention, ms"),
        *("GB/s", "memory, GB/s", "share of it"),
    )
    return Sheet(head, rows, f"weights {long.weights / _MB:.0f} MB")


def by_codec(model: Path, threads: int, rounds: int) -> Sheet:
    """Decode steps over each kind of blocks, the medians."""
    num_blocks = max(sequences * -(-context // BLOCK) for sequences, context in SHAPES)
    steps = {kind: make_step(model, kind, threads, num_blocks) for kind in KINDS}
    rows = []
    for sequences, context in SHAPES:
        plan = decode_plan(sequences, context)
        taken = in_turns({kind: timed(partial(steps[kind], plan)) for kind in KINDS}, rounds, warm_up=2)
        milliseconds = {kind: statistics.median(taken[kind]) * 1e3 for kind in KINDS}
        ratios = (f"{milliseconds[kind] / milliseconds['bf16']:.2f}" for kind in KINDS[1:])
        times = (f"{milliseconds[kind]:.1f}" for kind in KINDS)
        rows.append((f"{sequences} sequences of {context}", *times, *ratios))
    head = ("decode step", *(f"{kind}, ms" for kind in KINDS), *(f"{kind} / bf16" for kind in KINDS[1:]))
    return Sheet(head, rows)


def main(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory; with --sparse random weights where it is left out.")
    ] = None,
    sparse: Annotated[bool, typer.Option(help="Long contexts, dense and sparse.")] = False,
    lengths: Annotated[str, typer.Option(help="Of these contexts, in tokens; with --sparse.")] = LENGTHS,
    threads: Threads = CORES,
    rounds: Rounds = 15,
) -> None:
    """What KV blocks cost a decode step."""
    if sparse:
        contexts = [int(length) for length in lengths.split(",")]
        choice = SparseAttention(share=0.125, budget=2048)
        with tempfile.TemporaryDirectory() as made:
            if model is None:
                write_checkpoint(Path(made), LlamaShape.parse(SHAPE))
            long = Long(model or Path(made), threads, max(contexts), choice)
            show(long_contexts(long, contexts, rounds))
    elif model is None:
        raise typer.BadParameter("Name a model directory, or measure random weights with --sparse.")
    else:
        show(by_codec(model, threads, rounds))


if __name__ == "__main__":
    run(main)

"""Decode steps whose rows have LoRA adapters beside the same steps without:
`python -m benchmarks.engine.adapters --help`.

Models have random weights in the shapes of SmolLM2 135M and of a Llama of 1.1 billion. Both steps are measured in
turns, and their medians compared. What must be read more is told beside it: the bytes of the adapters' factors over
those of the weights, which is the ratio that a step bound by memory comes to.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from msgspec import structs

from benchmarks.engine.floors import SHAPES, write_random
from benchmarks.engine.steps import Decode, load_one_rank
from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, one_of, run, show, timed

BLOCKS = 1024
CONTEXT = 128
MODELS = {"135M": SHAPES["smollm2-135m"], "1.1B": SHAPES["llama"]}


class Cost(NamedTuple):
    """Of a step, in seconds, and what it reads, in bytes."""

    without: float
    adapted: float
    weights: int
    factors: int


def cost_of(
    directory: Path, codec: str, threads: int, rows: int, adapters: int, rank: int, rounds: int, kept: str
) -> Cost:
    """Rows take turns with their adapters: row i has adapter i modulo `adapters`."""
    from services.executor.core.step_plan import to_bytes
    from services.executor.model.adapters import whole_targets
    from services.executor.model.loading.loader import load_config
    from services.executor.model.quantizing import CODECS

    runner, _ = load_one_rank(directory, "bf16", threads, BLOCKS, weights=CODECS[codec] if codec else None)
    decoder: Any = runner._decoder  # noqa: SLF001
    if not runner.is_native:
        raise typer.BadParameter("the native kernels do not compute here")
    targets = whole_targets(load_config(directory))
    decoder.keep_as(kept)
    for slot in range(adapters):
        decoder.load(slot, random_adapter(targets, rank))
    steps = Decode(rows, CONTEXT).steps(BLOCKS, 0)
    for plan in steps.before:
        runner.forward(plan)
    slots = to_bytes([row % adapters for row in range(rows)])
    plans = [steps.measured, structs.replace(steps.measured, adapters=slots)]
    work = {at: timed(partial(runner.forward, plan)) for at, plan in enumerate(plans)}
    taken = in_turns(work, rounds, warm_up=3)
    assert runner.packed is not None
    linears = [linear for layer in runner.packed.layers for linear in layer.linears]
    return Cost(
        *map(statistics.median, taken.values()),
        sum(linear.nbytes for linear in [*linears, runner.packed.head]),
        sum(decoder.adapters.bytes_of(slot) for slot in range(adapters)),
    )


def random_adapter(targets: list[Any], rank: int) -> dict[str, Any]:
    from services.executor.model.adapters import LowRank

    return {
        target.name: LowRank(
            (torch.randn(rank, target.inputs) / target.inputs**0.5).bfloat16(),
            (torch.randn(target.outputs, rank) * 0.01).bfloat16(),
        )
        for target in targets
    }


def main(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "135M,1.1B",
    weights: Annotated[str, typer.Option(help="Of the base: bf16, or quantized as q4_k.")] = "bf16,q4_k",
    rows: Annotated[int, typer.Option(help="Sequences of the step.", min=1)] = 16,
    adapters: Annotated[int, typer.Option(help="Different ones among them.", min=1)] = 8,
    rank: Annotated[int, typer.Option(help="Of each, on all linears.", min=1, max=256)] = 16,
    adapter_dtype: Annotated[str, typer.Option(help="What adapters are kept as: int8 or bf16.")] = "int8",
    threads: Threads = CORES,
    rounds: Rounds = 30,
) -> None:
    """What adapters cost a decode step."""
    chosen = one_of("--models", models.split(","), MODELS)
    one_of("--adapter-dtype", [adapter_dtype], ("int8", "bf16"))
    found = []
    for model in chosen:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_random(directory, MODELS[model])
            for kind in weights.split(","):
                codec = "" if kind == "bf16" else kind
                cost = cost_of(directory, codec, threads, rows, adapters, rank, rounds, adapter_dtype)
                figures = (cost.without * 1e3, cost.adapted * 1e3)
                ratios = (cost.adapted / cost.without, 1 + cost.factors / cost.weights)
                nbytes = (f"{one / 1e6:.0f} M" for one in (cost.weights, cost.factors))
                times = (f"{one:.2f}" for one in figures)
                found.append((model, kind, *times, f"{ratios[0]:.3f}", *nbytes, f"{ratios[1]:.3f}"))
    head = ("model", "weights", "ms", "with adapters", "ratio", "bytes", "of adapters", "ratio")
    title = f"{rows} rows, {adapters} adapters of rank {rank} in {adapter_dtype}, {threads} threads"
    show(Sheet(head, found, title))


if __name__ == "__main__":
    run(main)

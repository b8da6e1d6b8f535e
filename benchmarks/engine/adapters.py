"""Decode steps whose rows have LoRA adapters beside the same steps without:
`python -m benchmarks.engine.adapters --help`.

Models have random weights in the shapes of SmolLM2 135M and of a Llama of 1.1 billion. Both steps are measured in
turns, and their medians compared. What must be read more is told beside it: the bytes of the adapters' factors over
those of the weights, which is the ratio that a step bound by memory comes to.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.engine.floors import SHAPES, write_random
from benchmarks.engine.steps import Decode, load_one_rank
from benchmarks.errors import told_in_a_sentence

BLOCKS = 1024
CONTEXT = 128
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MODELS = {"135M": SMALL, "1.1B": SHAPES["llama"]}


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
    taken: list[list[float]] = [[], []]
    for turn in range(rounds + 3):
        for times, plan in zip(taken, plans, strict=True):
            began = time.perf_counter()
            runner.forward(plan)
            if turn >= 3:
                times.append(time.perf_counter() - began)
    assert runner.packed is not None
    linears = [linear for layer in runner.packed.layers for linear in layer.linears]
    return Cost(
        *map(statistics.median, taken),
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
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Steps to take the median of.", min=1)] = 30,
) -> None:
    """What adapters cost a decode step."""
    if unknown := set(models.split(",")) - set(MODELS):
        raise typer.BadParameter(f"{unknown.pop()} is not one of {', '.join(MODELS)}")
    if adapter_dtype not in ("int8", "bf16"):
        raise typer.BadParameter(f"{adapter_dtype} is neither int8 nor bf16")
    title = f"{rows} rows, {adapters} adapters of rank {rank} in {adapter_dtype}, {threads} threads"
    table = Table(
        "model", "weights", "ms", "with adapters", "ratio", "bytes", "of adapters", "ratio", title=title
    )
    with told_in_a_sentence():
        for model in models.split(","):
            with tempfile.TemporaryDirectory() as directory:
                write_random(Path(directory), MODELS[model])
                for kind in weights.split(","):
                    codec = "" if kind == "bf16" else kind
                    cost = cost_of(
                        Path(directory), codec, threads, rows, adapters, rank, rounds, adapter_dtype
                    )
                    table.add_row(
                        model,
                        kind,
                        f"{cost.without * 1e3:.2f}",
                        f"{cost.adapted * 1e3:.2f}",
                        f"{cost.adapted / cost.without:.3f}",
                        f"{cost.weights / 1e6:.0f} M",
                        f"{cost.factors / 1e6:.0f} M",
                        f"{1 + cost.factors / cost.weights:.3f}",
                    )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

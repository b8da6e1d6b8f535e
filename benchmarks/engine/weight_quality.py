"""What weights of eight bits cost in quality: `python -m benchmarks.engine.weight_quality --help`.

On a CPU, by what the GPU's products compute with: the weights of all linear layers but the head are quantised and
widened again, by the executor's own codecs, one scale per output. With activations, every row that goes into such a
layer too, as `torch._scaled_mm` has it for steps of many rows. Everything else is computed in bf16.

Perplexity is over every token of a window but its first, right is the share of them that are the most likely ones, and
top-1 the share of positions whose most likely next token is the same as with bf16.
"""

import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.engine.kv_quality import Tokens, cut
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.weight_formats import quantize


@dataclass(frozen=True)
class Way:
    """How linear layers are computed."""

    name: str
    codec: Codec | None = None
    activations: bool = False


WAYS = (
    Way("bf16"),
    Way("fp8, few rows", FP8),
    Way("fp8, many rows", FP8, activations=True),
    Way("int8", INT8),
    Way("int8, activations too", INT8, activations=True),
)
"""What is compared with the first. The last is not served: it shows what `torch._int_mm` would cost."""


@dataclass
class Reading:
    """What one way made of the text."""

    loss: float
    """Sum of -log p over all tokens but the windows' first."""
    best: Tokens
    """Most likely next token at each position [windows, context]."""


def widened(rows: Tensor, codec: Codec) -> Tensor:
    """`rows` [..., n] after `codec` has rounded them, a scale for each, in their dtype."""
    codes, scales = codec.encode(rows)
    return codec.decode(codes, scales).to(rows.dtype)


def linears_of(model: Any) -> Iterator[nn.Linear]:
    """What is quantised."""
    head = model.get_output_embeddings()
    yield from (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)


@contextmanager
def computing(model: Any, way: Way) -> Iterator[None]:
    """Has `model` compute as `way` says, and as before afterwards."""
    codec = way.codec
    if codec is None:
        yield
        return
    before = [(linear, linear.weight.data) for linear in linears_of(model)]
    hooks = []
    for linear, weight in before:
        stored = quantize(weight, codec)
        linear.weight.data = codec.decode(*stored).to(weight.dtype)
        if way.activations:
            hooks.append(
                linear.register_forward_pre_hook(lambda _, given, codec=codec: (widened(given[0], codec),))
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for linear, weight in before:
            linear.weight.data = weight


@torch.inference_mode()
def read_text(model: Any, windows: Tokens, batch: int) -> Reading:
    """Reads `windows` [n, context], `batch` of them side by side."""
    loss, best = 0.0, np.empty_like(windows)
    for start in range(0, len(windows), batch):
        some = torch.from_numpy(windows[start : start + batch])
        logits = model(input_ids=some, use_cache=False).logits.float()
        best[start : start + batch] = logits.argmax(-1).numpy()
        known = logits[:, :-1].flatten(0, 1)
        loss += float(nn.functional.cross_entropy(known, some[:, 1:].flatten(), reduction="sum"))
    return Reading(loss, best)


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to read instead.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read, at least.", min=64)] = 8192,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=64)] = 512,
    batch: Annotated[int, typer.Option(help="Windows read side by side.", min=1)] = 4,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
) -> None:
    """Perplexity and agreement of each way to compute linear layers."""
    torch.set_num_threads(threads)
    whole = text.read_text(encoding="utf-8") if text else "\n\n".join(topics[name] for name in sorted(topics))
    windows = cut(whole, model, tokens, context)
    loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16).eval()
    name = text.name if text else f"the language reference of Python {platform.python_version()}"
    console = Console(width=100)
    console.print(f"{model.name}: {windows.size} tokens of {name}, windows of {context}")
    table = Table("linear layers", "perplexity", "change", "right", "change", "top-1")
    first: tuple[Reading, float] | None = None
    predicted = windows.size - len(windows)
    for way in WAYS:
        with computing(loaded, way):
            reading = read_text(loaded, windows, batch)
        right = float((reading.best[:, :-1] == windows[:, 1:]).mean())
        first = first or (reading, right)
        table.add_row(
            way.name,
            f"{math.exp(reading.loss / predicted):.4f}",
            f"{math.exp((reading.loss - first[0].loss) / predicted) - 1:+.2%}",
            f"{right:.2%}",
            f"{right / first[1] - 1:+.2%}",
            f"{(reading.best == first[0].best).mean():.2%}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

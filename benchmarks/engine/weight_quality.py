"""What quantized weights cost in quality: `python -m benchmarks.engine.weight_quality --help`.

The weights of all linear layers but a head that is not the embedding are quantised by the executor's own codecs, or as
`models convert` writes them to a GGUF file, and widened again: the format's own cost. With activations, what goes into
such a layer is rounded too: to int8 as the CPU's kernels have it (their integer sums are exact, so this is their cost
beside the format's), or row by row as `torch._scaled_mm` on GPUs. Everything else is computed in `--dtype`. Served is
what the executor itself computes from the same weights, with nothing simulated: its kernels, bf16 between layers and in
the KV cache.

Perplexity is over every token of a window but its first (`--skip` more), right is the share of them that are the most
likely ones, top-1 the share of positions whose most likely next token is the same as without quantizing, and KL the
mean divergence of the next token's distribution there, in nats.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.engine.kv_quality import (
    DTYPES,
    Batch,
    Context,
    Feed,
    Model,
    Reading,
    ReadTokens,
    TextFile,
    Tokens,
    cut,
    text_of,
)
from benchmarks.harness import CORES, Dtype, Sheet, Threads, run, show
from services.executor.cpu.quantized import activation_span, format_of, servable
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.conversion import gguf_header
from services.executor.model.conversion.gguf_types import DTYPES as GGUF_DTYPES
from services.executor.model.conversion.gguf_types import GgufDtype, encoded, type_of
from services.executor.model.loading.checkpoints import resolve_model
from services.executor.model.loading.gguf_blocks import values
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS, RowsCodec
from services.executor.model.weight_formats import WeightCodec, quantize
from shared.model_store.settings import Store


@dataclass(frozen=True)
class Way:
    """How linear layers are computed."""

    name: str
    codec: WeightCodec | GgufDtype | None = None
    activations: partial[Tensor] | None = None  # what rounds the rows that go into a layer
    served: bool = False  # by the executor itself


def widened(rows: Tensor, codec: Codec) -> Tensor:
    """`rows` [..., n] after `codec` has rounded them, a scale for each, in their dtype."""
    codes, scales = codec.encode(rows)
    return codec.decode(codes, scales).to(rows.dtype)


def rounded(rows: Tensor, codec: RowsCodec | None = None) -> Tensor:
    """`rows` [..., n] as the CPU's kernels take them for weights of `codec`; None: of a format whose groups are 32.
    GGUF's K types are none: they lose more than is shown, as `q4_k` does."""
    span = 32 if codec is None else activation_span(format_of(servable(codec.empty(1, rows.shape[-1]))))
    filled = nn.functional.pad(rows.float(), (0, -rows.shape[-1] % span)).unflatten(-1, (-1, span))
    scales = filled.abs().amax(-1, keepdim=True) / 127
    codes = (filled / scales.clamp(min=1e-30)).round_()
    return (codes * scales).flatten(-2)[..., : rows.shape[-1]].to(rows.dtype)


# What is compared with the first. The last is not served: it shows what `torch._int_mm` would cost.
WAYS = (
    Way("plain"),
    Way("as it is, activations too", activations=partial(rounded)),
    Way("as it is, served", served=True),
    *(
        Way(name + also, codec, activations, served)
        for name, codec in CODECS.items()
        for also, activations, served in (
            ("", None, False),
            (", activations too", partial(rounded, codec=codec), False),
            (", served", None, True),
        )
    ),
    *(
        Way(f"GGUF {name}{also}", dtype, activations)
        for name, dtype in GGUF_DTYPES.items()
        if name != "f32"
        for also, activations in (("", None), (", activations too", partial(rounded)))
    ),
    Way("fp8, few rows", FP8),
    Way("fp8, many rows", FP8, partial(widened, codec=FP8)),
    Way("int8 on GPUs", INT8),
    Way("int8 on GPUs, activations too", INT8, partial(widened, codec=INT8)),
)


def linears_of(model: Any, way: Way) -> Iterator[tuple[nn.Module, WeightCodec | Type]]:
    """What is quantised, and by what: on CPUs embedding and head too."""
    if isinstance(way.codec, GgufDtype):
        yield from _in_gguf(model, way.codec)
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for module in model.modules():
        if way.codec is None or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if module is not head and module is not embedding:
            yield module, way.codec
        elif isinstance(way.codec, RowsCodec) and not (module is head and head.weight is embedding.weight):
            yield module, way.codec.for_vocabulary()


def _in_gguf(model: Any, dtype: GgufDtype) -> Iterator[tuple[nn.Module, Type]]:
    """Each matrix, and the type that it has in such a file."""
    config = model.config.to_dict()
    listed = [name for name, _ in model.named_parameters()]
    names = gguf_header.names_of(listed, gguf_header.architecture_of(config), config)
    for name, weight in model.named_parameters():
        kind = type_of(names[name], tuple(weight.shape), dtype, config["num_hidden_layers"])
        if kind is not Type.F32:
            yield model.get_submodule(name.rpartition(".")[0]), kind


@contextmanager
def computing(model: Any, way: Way) -> Iterator[None]:
    """Has `model` compute as `way` says, and as before afterwards."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    hooks = []
    for module, codec in linears_of(model, way):
        weight = module.weight
        assert isinstance(weight, nn.Parameter), "a layer's weight is one"
        before.append((weight, weight.data))
        weight.data = _requantized(weight.data, codec)
    if way.activations is not None:
        change = way.activations
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and (module is not head or change.func is rounded):
                hooks.append(module.register_forward_pre_hook(lambda _, given: (change(given[0]),)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in before:
            parameter.data = data


def _requantized(weight: Tensor, codec: WeightCodec | Type) -> Tensor:
    if isinstance(codec, Type):
        raw = torch.from_numpy(np.ascontiguousarray(encoded(weight, codec)).view(np.uint8))
        return values(raw.view(len(weight), -1), codec).view(weight.shape).to(weight.dtype)
    stored = quantize(weight, codec)
    if isinstance(stored, QuantizedRows):
        return stored.dequantized().to(weight.dtype)
    assert isinstance(codec, Codec), "others make rows"
    return codec.decode(*stored).to(weight.dtype)


Compute = Callable[[Tensor], Tensor]  # logits [n, context, vocab] of tokens [n, context]


def by_transformers(model: Any) -> Compute:
    return lambda some: model(input_ids=some, use_cache=False).logits.float()


def by_the_executor(directory: Path, codec: RowsCodec | None, rows: int, context: int) -> Compute:
    """The model in `directory` on CPUs, its weights quantized by `codec` or as they are, KV blocks in bf16, for `rows`
    windows of `context` tokens at most."""
    feed = Feed(Model.load(directory, torch.bfloat16, codec), "bf16", rows, context, chunk=context)

    def compute(some: Tensor) -> Tensor:
        feed.restart()
        filled = np.resize(some.numpy(), (rows, context))  # with repeats
        return feed.step(filled)[: len(some)].float()

    return compute


@torch.inference_mode()
def read_text(compute: Compute, windows: Tokens, batch: int, plain: "Logits | None" = None, skip: int = 0) -> Reading:
    """Reads `windows` [n, context], `batch` of them side by side. `plain` is filled where it is empty, and
    compared with where it is not."""
    loss, divergence, best = 0.0, 0.0, np.empty_like(windows)
    for start in range(0, len(windows), batch):
        some = torch.from_numpy(windows[start : start + batch])
        logits = compute(some)
        best[start : start + batch] = logits.argmax(-1).numpy()
        known = logits[:, skip:-1].flatten(0, 1)
        loss += float(nn.functional.cross_entropy(known, some[:, skip + 1 :].flatten(), reduction="sum"))
        if plain is not None:
            divergence += plain.compared(logits, start)
    return Reading(loss, best, divergence / windows.size)


class Logits:
    """What the first way made of the text, in a file: float16 [n, context, vocabulary]."""

    def __init__(self, directory: Path, windows: Tokens, vocabulary: int) -> None:
        shape = (*windows.shape, vocabulary)
        self._held = np.memmap(directory / "logits", np.float16, "w+", shape=shape)
        self._whole = 0

    def compared(self, logits: Tensor, start: int) -> float:
        """The sum of the divergences of `logits`, of the windows from `start` on; 0 where they are the first."""
        end = start + len(logits)
        if self._whole < end:
            self._held[start:end] = logits.numpy()
            self._whole = end
            return 0.0
        total = 0.0
        for at, row in enumerate(logits):
            first = torch.from_numpy(self._held[start + at]).float().log_softmax(-1)
            total += float((first.exp() * (first - row.log_softmax(-1))).sum())
        return total


def opened(model: Path, dtype: torch.dtype, scratch: Path) -> tuple[Any, Path]:
    """(the model, the directory that it is served from) of a model directory or a .gguf file, which is unpacked."""
    if model.is_file():
        directory = resolve_model(str(model), Store.at(scratch), lambda *_: None)
        unpacked = {"gguf_file": model.name, "local_files_only": True}
        return AutoModelForCausalLM.from_pretrained(str(model.parent), dtype=dtype, **unpacked).eval(), directory
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype).eval(), model


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory (`ryzanstein models list` shows where one is) or a .gguf file.")
    ],
    text: TextFile = None,
    tokens: ReadTokens = 20_480,
    context: Context = 512,
    batch: Batch = 4,
    ways: Annotated[str, typer.Option(help="Their names' beginnings, with commas between; empty: all.")] = "",
    skip: Annotated[
        int,
        typer.Option(
            help="Tokens after each window's first that are read and not counted; llama-perplexity: half a window.",
            min=0,
        ),
    ] = 0,
    dtype: Dtype = "fp32",
    threads: Threads = CORES,
) -> None:
    """Perplexity and agreement of each way to compute linear layers."""
    if skip >= context - 1:
        raise typer.BadParameter(f"--skip {skip} leaves nothing of windows of {context}.")
    torch.set_num_threads(threads)
    name, whole = text_of(text)
    chosen = [way for way in WAYS[1:] if way.name.startswith(tuple(ways.split(",")))]
    with tempfile.TemporaryDirectory() as scratch:
        loaded, directory = opened(model, DTYPES[dtype], Path(scratch))
        windows = cut(whole, directory, tokens, context)
        show(f"{model.name}: {windows.size} tokens of {name}, windows of {context}")
        plain = Logits(Path(scratch), windows, loaded.config.vocab_size)
        readings = {}
        for way in (WAYS[0], *chosen):
            if way.served:
                assert not isinstance(way.codec, GgufDtype | Codec), "those are read from files"
                served = by_the_executor(directory, way.codec, batch, context)
                readings[way.name] = read_text(served, windows, batch, plain, skip)
                continue
            with computing(loaded, way):
                readings[way.name] = read_text(by_transformers(loaded), windows, batch, plain, skip)
    show(sheet_of(readings, windows, skip))


def sheet_of(readings: Mapping[str, Reading], windows: Tokens, skip: int) -> Sheet:
    """A line for each way, the first of which the others are compared with."""
    first, rows = next(iter(readings.values())), []
    predicted = windows.size - len(windows) * (1 + skip)

    def right(reading: Reading) -> float:
        return float((reading.best[:, skip:-1] == windows[:, skip + 1 :]).mean())

    for name, reading in readings.items():
        change = math.exp((reading.loss - first.loss) / predicted) - 1
        shares = (f"{right(reading):.2%}", f"{right(reading) / right(first) - 1:+.2%}")
        same = (f"{(reading.best == first.best).mean():.2%}", f"{reading.divergence:.5f}")
        rows.append((name, f"{math.exp(reading.loss / predicted):.4f}", f"{change:+.2%}", *shares, *same))
    return Sheet(("weights", "perplexity", "change", "right", "change", "top-1", "KL"), rows)


if __name__ == "__main__":
    run(main)

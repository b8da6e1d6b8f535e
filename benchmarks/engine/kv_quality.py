"""What compressed KV blocks cost in quality and save in memory: `python -m benchmarks.engine.kv_quality --help`.

A text is cut into windows of `context` tokens. Each is computed in chunks, by the executor's own model
runner and store, which compress each block as it is full. A token attends to its own block as it was
computed and to those before it compressed, in whatever chunks the text is read (docs/adr/0024).

Perplexity is over every token of a window but its first. Top-1: share of positions whose most likely next token is the
same as with `bf16`.

The text, unless a file is given: the Python language reference that the interpreter carries for `help()`.
"""

import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.engine.steps import BLOCK, Row, step_plan
from benchmarks.harness import CORES, Dtype, ModelDirectory, Sheet, Threads, run, show
from services.executor.collectives.base import SingleRank
from services.executor.core.settings import layer_dtypes, parse_layers
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import to_bytes
from services.executor.kv_cache.codecs import codecs_of
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.quantizing import RowsCodec
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.runner import ModelRunner
from shared.data_types import BlockDType

# What is compared with the first: default and layers that differ from it.
CODECS = ("bf16", "fp8", "int8", "fp8 0=bf16,-1=bf16", "int8 0=bf16,-1=bf16")
CPU = torch.device("cpu")
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Model:
    """A model on one rank, and what its store is made from."""

    directory: Path
    num_layers: int
    layout: ShardLayout
    dtype: torch.dtype
    weights: RowsCodec | None = None  # what quantizes them; none: they are as the files have them

    def runner(self, store: KvStore) -> ModelRunner:
        """What serves it: the native kernels where they can, which take the weights, hence loaded each time."""
        module = load_model(
            self.directory,
            self.dtype,
            self.layout,
            SingleRank(),
            CPU,
            lambda done, total: None,
            self.weights,
            keep_codes=True,
        )
        return backend_of(CPU).runner(
            RunnerRequest(module, store, self.layout, SingleRank(), CPU, torch.get_num_threads())
        )

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, weights: RowsCodec | None = None) -> "Model":
        config = load_config(directory)
        layout = ShardLayout.from_config(config, 1, 0)
        return cls(directory, config.num_hidden_layers, layout, dtype, weights)

    def shape(self, codec: str) -> StoreShape:
        """`codec`: a block dtype, and after a space layers that differ from it."""
        default, _, layers = codec.partition(" ")
        names: dict[str, BlockDType] = {"bf16": "bf16", "fp8": "fp8", "int8": "int8"}
        dtypes = layer_dtypes(names[default], parse_layers(layers), self.num_layers)
        heads, width = self.layout.kv_heads.size, self.layout.head_dim
        return StoreShape.uniform(self.num_layers, BLOCK, heads, width, self.dtype, codecs_of(dtypes))


class Feed:
    """Sequences of equal length, computed side by side; each step compresses the blocks that it fills."""

    def __init__(self, model: Model, codec: str, sequences: int, length: int, chunk: int) -> None:
        self._sequences = np.arange(sequences)[:, None]
        self._fresh = -(-chunk // BLOCK) + 1
        per_sequence = -(-length // BLOCK)
        shape = model.shape(codec)
        self._store = KvStore(shape, sequences * self._fresh, CPU, sequences * per_sequence)
        self._runner = model.runner(self._store)
        self._quantized = self._store.num_writable + self._sequences * per_sequence + np.arange(per_sequence)
        self._done = 0

    def restart(self) -> None:
        """Has the next step begin other sequences."""
        self._done = 0

    def step(self, tokens: Tokens) -> Tensor:
        """Logits float32 [sequences, n, vocab] of the next `tokens` [sequences, n]."""
        begin, end = self._done, self._done + tokens.shape[1]
        last, rows = (end - 1) // BLOCK, len(tokens)
        tables = np.hstack((self._quantized[:, :last], self._writable(np.array([last]))))
        written = self._writable(np.arange(last + 1))
        full = np.arange(begin // BLOCK, end // BLOCK)
        pairs = np.stack((self._writable(full), self._quantized[:, full]), axis=-1)
        plan = step_plan(
            [Row(end, end - begin, *blocks) for blocks in zip(tables, written, strict=True)],
            token_ids=to_bytes(tokens.ravel()),
            sample_rows=to_bytes(np.arange(tokens.size)),
            compressions=to_bytes(pairs),
        )
        logits = self._runner.forward(plan)
        assert isinstance(logits, Tensor)
        self._done = end
        return logits.view(rows, end - begin, -1)

    def read(self, tokens: Tokens, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """(position of the first, logits) of each `chunk` of `tokens` [sequences, n]."""
        for begin in range(0, tokens.shape[1], chunk):
            yield begin, self.step(tokens[:, begin : begin + chunk])

    def _writable(self, blocks: Tokens) -> Tokens:
        """Writable ids [sequences, n] of the sequences' `blocks` [n]; they go round, since full ones are compressed."""
        return self._sequences * self._fresh + blocks % self._fresh


@dataclass
class Reading:
    """What one codec, or way to compute, made of the text."""

    loss: float  # sum of -log p over all tokens but the windows' first, and those that were skipped
    best: Tokens  # most likely next token at each position [windows, context]
    divergence: float = 0.0  # mean over all positions, in nats


def read_text(model: Model, codec: str, windows: Tokens, chunk: int, batch: int) -> Reading:
    """Reads `windows` [n, context], `batch` of them side by side."""
    loss, best = 0.0, np.empty_like(windows)
    for start in range(0, len(windows), batch):
        some = windows[start : start + batch]
        for begin, logits in Feed(model, codec, len(some), some.shape[1], chunk).read(some, chunk):
            end = begin + logits.shape[1]
            best[start : start + batch, begin:end] = logits.argmax(-1).numpy()
            following = torch.from_numpy(some[:, begin + 1 : end + 1])
            known = logits[:, : following.shape[1]].flatten(0, 1)
            loss += float(nn.functional.cross_entropy(known, following.flatten(), reduction="sum"))
    return Reading(loss, best)


def cut(text: str, directory: Path, tokens: int, context: int) -> Tokens:
    """The first `tokens` tokens of `text`, in windows [n, context]."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    count = -(-tokens // context)
    # A token has two characters and more, in prose.
    ids = tokenizer.encode(text[: count * context * 12], add_special_tokens=False).ids
    if len(ids) < count * context:
        raise typer.BadParameter(f"The text has {len(ids)} tokens, fewer than the {count * context} asked for.")
    return np.array(ids[: count * context]).reshape(count, context)


def text_of(file: Path | None) -> tuple[str, str]:
    """(its name, the text) of a file, or of what is read without one."""
    if file is not None:
        return file.name, file.read_text(encoding="utf-8")
    name = f"the language reference of Python {platform.python_version()}"
    return name, "\n\n".join(topics[topic] for topic in sorted(topics))


TextFile = Annotated[Path | None, typer.Option(help="A UTF-8 text to read instead.")]
ReadTokens = Annotated[int, typer.Option(help="Tokens to read, at least.", min=64)]
Context = Annotated[int, typer.Option(help="Tokens of a window.", min=64)]
Batch = Annotated[int, typer.Option(help="Windows read side by side.", min=1)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(
    model: ModelDirectory,
    text: TextFile = None,
    tokens: ReadTokens = 20_480,
    context: Context = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens of each sequence that a step computes.", min=2)] = 64,
    batch: Batch = 4,
    dtype: Dtype = "bf16",
    codec: Annotated[list[str] | None, typer.Option(help='Such as "int8 0=bf16,-1=bf16"; several: repeat it.')] = None,
    threads: Threads = CORES,
) -> None:
    """Perplexity, agreement and bytes per token of each codec."""
    torch.set_num_threads(threads)
    name, whole = text_of(text)
    windows = cut(whole, model, tokens, context)
    loaded = Model.load(model, DTYPES[dtype])
    readings = {}
    for each in (CODECS[0], *(codec or CODECS[1:])):
        readings[each] = read_text(loaded, each, windows, chunk, batch)
    first, predicted, rows = readings[CODECS[0]], windows.size - len(windows), []
    for each, reading in readings.items():
        shape = loaded.shape(each)
        perplexity = math.exp(reading.loss / predicted)
        change = math.exp((reading.loss - first.loss) / predicted) - 1
        nbytes = shape.bytes_per_quantized_block
        sizes = (f"{nbytes / BLOCK:.0f}", f"{nbytes / shape.bytes_per_block:.2%}")
        same = f"{(reading.best == first.best).mean():.2%}"
        rows.append((each, *sizes, f"{perplexity:.4f}", f"{change:+.3%}", same))
    head = ("blocks", "bytes/token", "of bf16", "perplexity", "change", "top-1")
    about = f"{windows.size} tokens of {name}, windows of {context}, chunks of {chunk}"
    show(f"{model.name}, {dtype}: {about}", Sheet(head, rows))


if __name__ == "__main__":
    run(main)

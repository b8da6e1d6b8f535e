"""Llamas of random weights, written as fast as memory takes them
(`python -m benchmarks.random_model`): all tensors take some of the same numbers, each from a place of its own.

What is measured on them does not depend on what they say. There is no tokenizer.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig

from benchmarks.harness import run
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import RowsCodec

DEVIATION = 0.02  # of the weights


@dataclass(frozen=True)
class LlamaShape:
    """What the size of a Llama follows from."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> "LlamaShape":
        """`text`, like "1024,16,4,2816,16,32000": the fields in their order. Raises ValueError."""
        names = ",".join(field.name for field in fields(cls))
        parts = text.split(",")
        if len(parts) != len(fields(cls)) or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"{text!r} is not {names}, six positive numbers with commas between them")
        shape = cls(*map(int, parts))
        if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
            raise ValueError(f"{text!r}: hidden must be a multiple of heads, and heads one of kv_heads")
        return shape

    @property
    def layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, by name."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = (("q", self.hidden), ("k", kv), ("v", kv), ("o", self.hidden))
        return {
            **{f"self_attn.{name}_proj": (rows, self.hidden) for name, rows in attention},
            **{f"mlp.{name}_proj": (self.inner, self.hidden) for name in ("gate", "up")},
            "mlp.down_proj": (self.hidden, self.inner),
            **{f"{name}_layernorm": (self.hidden,) for name in ("input", "post_attention")},
        }


def write_config(directory: Path, shape: LlamaShape, **others: Any) -> None:
    """config.json of a model of `shape`; `others`: more of its configuration."""
    LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        architectures=["LlamaForCausalLM"],
        **others,
    ).save_pretrained(str(directory))


SHAPES = {
    # TinyLlama 1.1B with SmolLM2's vocabulary, whose tokenizer it gets: 2.5 GB.
    "1.1b": LlamaShape(2048, 32, 4, 5632, 22, 49152),
    "8b": LlamaShape(4096, 32, 8, 14336, 32, 128256),  # Llama 3 8B
    "13b": LlamaShape(5120, 40, 40, 13824, 40, 32000),  # Llama 2 13B
    "tiny": LlamaShape(64, 2, 1, 128, 2, 256),
}
# Files that a server needs beside weights, where the tokenizer has them.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NUMBERS = 1 << 25  # random ones
STRIDE = 1_000_003 * 8  # numbers between the places that two tensors begin at
LAYERS_PER_FILE = 2
Shapes = dict[str, tuple[int, ...]]  # shapes of tensors by name


def bytes_of(shape: LlamaShape) -> int:
    """Of its weights."""
    sizes = [size for _, tensors in _files(shape) for size in tensors.values()]
    return sum(2 * torch.Size(size).numel() for size in sizes)


def write_checkpoint(directory: Path, shape: LlamaShape, threads: int | None = None) -> int:
    """A bf16 Llama of `shape` in `directory`, which is made; the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, shape, max_position_embeddings=16384, dtype="bfloat16")
    files = dict(_files(shape))
    random = torch.Generator().manual_seed(1)
    # No more than the largest tensor needs.
    numbers = min(NUMBERS, max(shape.inner, shape.vocabulary) * shape.hidden)
    pool = torch.empty(numbers, dtype=torch.bfloat16).normal_(0, DEVIATION, generator=random)
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    contents = (_bytes(pool), _bytes(ones))
    names = sorted(name for tensors in files.values() for name in tensors)
    starts = {name: index * STRIDE % numbers * 2 for index, name in enumerate(names)}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as workers:
        jobs = [workers.submit(_write, directory / file, tensors, starts, *contents) for file, tensors in files.items()]
        total = sum(job.result() for job in jobs)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def random_rows(codec: RowsCodec, outputs: int, inputs: int, device: torch.device) -> QuantizedRows:
    """A weight as `codec` makes them, of random codes and scales: values of about `DEVIATION`."""
    made, generator = codec.empty(outputs, inputs).to(device), torch.Generator(device).manual_seed(1)
    half = 1 << (made.bits - 1)
    step = DEVIATION / (0.58 * half)

    def near(part: torch.Tensor, value: float) -> None:
        """Between half of it and one and a half."""
        spread = torch.rand(part.shape, generator=generator, device=device) + 0.5
        part.copy_(spread.mul_(value).round_() if not part.is_floating_point() else spread.mul_(value))

    made.codes.random_(0, 2 * half, generator=generator)
    near(made.scales, step if made.supers is None else 32)
    for part, value in (
        (made.zeros, half),
        (made.mins, 32),
        (made.supers, step / 32),
        (made.super_mins, step * half / 32),
    ):
        if part is not None:
            near(part, value)
    return made


def shape_of(text: str) -> LlamaShape:
    """One of `SHAPES`, or six numbers. Raises ValueError."""
    return SHAPES.get(text) or LlamaShape.parse(text)


def shape_option(text: str) -> LlamaShape:
    """Of `--random`. Raises typer.BadParameter."""
    try:
        return shape_of(text)
    except ValueError as error:
        raise typer.BadParameter(f"--random {error}.") from None


def write_servable(directory: Path, shape: LlamaShape, tokenizer: Path) -> None:
    """`write_checkpoint` with the tokenizer of the model directory `tokenizer`. It appears whole or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".partial-") as scratch:
        partial = Path(scratch) / directory.name
        write_checkpoint(partial, shape)
        for name in TOKENIZER:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, partial / name)
        partial.rename(directory)


def _files(shape: LlamaShape) -> Iterator[tuple[str, Shapes]]:
    """(file name, its tensors)"""
    vocabulary = (shape.vocabulary, shape.hidden)
    groups: list[Shapes] = [
        {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (shape.hidden,)},
        {"lm_head.weight": vocabulary},
    ]
    for first in range(0, shape.layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, shape.layers))
        groups.append({f"model.layers.{n}.{name}.weight": size for n in layers for name, size in shape.layer.items()})
    for number, group in enumerate(groups, 1):
        yield f"model-{number:05}-of-{len(groups):05}.safetensors", group


def _write(path: Path, tensors: Shapes, starts: dict[str, int], pool: memoryview, ones: memoryview) -> int:
    """Writes one file; the bytes of its tensors."""
    entries, offset = {}, 0
    for name, size in tensors.items():
        end = offset + 2 * torch.Size(size).numel()
        entries[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 64)
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in tensors.items():
            # Norms multiply by about one.
            source, start = (ones, 0) if len(size) == 1 else (pool, starts[name])
            for part in _cut(source, start, 2 * torch.Size(size).numel()):
                file.write(part)
    return offset


def _cut(source: memoryview, start: int, count: int) -> Iterator[memoryview]:
    """`count` bytes of `source` from `start` on, and from its begin again."""
    while count:
        part = source[start : start + min(count, 1 << 30)]
        yield part
        start, count = 0, count - len(part)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def main(
    directory: Annotated[Path, typer.Argument(help="Where to; in /dev/shm it is in the page cache.")],
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}, or six numbers: see random_model.py.")] = "8b",
) -> None:
    """Writes a checkpoint of random weights."""
    total = write_checkpoint(directory, shape_of(shape))
    print(f"{total / 1e9:.2f} GB in {directory}")


if __name__ == "__main__":
    run(main)

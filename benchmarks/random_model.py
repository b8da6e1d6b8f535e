"""Llamas of random weights, in any shape: what is measured on them does not depend on what they say."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

DEVIATION = 0.02
"""Of the weights."""


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
    """config.json of a Llama of `shape`; `others`: more of `LlamaConfig`."""
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


def write_llama(directory: Path, shape: LlamaShape, kind: str = "safetensors") -> None:
    """A bf16 Llama of `shape` in `directory`, in files of two layers each; `kind`: safetensors or bin."""
    write_config(directory, shape)
    layer = shape.layer
    shapes = {
        f"model.layers.{n}.{name}.weight": size for n in range(shape.layers) for name, size in layer.items()
    }
    rows = (shape.vocabulary, shape.hidden)
    outer = {"lm_head.weight": rows, "model.embed_tokens.weight": rows, "model.norm.weight": (shape.hidden,)}
    names = list(shapes)
    step = 2 * len(layer)
    groups = [{name: shapes[name] for name in names[at : at + step]} for at in range(0, len(names), step)]
    _write_files(directory, [outer, *groups], kind)


def _write_files(directory: Path, groups: list[dict[str, tuple[int, ...]]], kind: str) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    ending = "safetensors" if kind == "safetensors" else "bin"
    index = {}
    for number, group in enumerate(groups, 1):
        file = f"{stem}-{number:05}-of-{len(groups):05}.{ending}"
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, DEVIATION)
            for name, shape in group.items()
        }
        if kind == "safetensors":
            save_file(tensors, directory / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, directory / file)
        index |= dict.fromkeys(group, file)
    (directory / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": index}))

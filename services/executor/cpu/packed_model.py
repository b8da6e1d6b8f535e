"""A lowered model with its linears packed: all that the native kernels need of one rank's share, in the order in which
they read it (see `native/gemm.h`); and what they ask of a model beyond its shape (`model/lowering.py`).

model ──lower──▶ modules and numbers ──pack──▶ PackedModel ──▶ kernels
                                                 ▲  │
                                a later start ───┘  └──▶ weight_cache.py
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.executor.core.sharding import ShardLayout, split_dimension
from services.executor.cpu.packed_linear import (
    GATE_RUN,
    PackedLinear,
    Piece,
    alternating,
    one_after_another,
    split_rows,
)
from services.executor.model import lowering
from services.executor.model.lowering import (
    Activation,
    CannotLower,
    Lowered,
    LoweredLayer,
    Scalars,
    linears_of,
    release,
    vocabulary,
    weights_of,
)

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
"""As `decoder.h` numbers them."""
_MOST_GROUP = 48
"""Query heads of a KV head that a tile of attention has room for (`attention.h`)."""
_HEAD_DIMS = frozenset(range(32, 257, 32))


def lower(model: Any, dtype: torch.dtype, world_size: int) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed.

    Raises `CannotLower` with the reason, on all `world_size` ranks or on none.
    """
    lowered = lowering.lower(model, dtype)
    if dtype is not torch.bfloat16:
        raise CannotLower("only bf16 is computed by the native kernels")
    config = model.config
    _check_widths(config, world_size)
    if config.num_attention_heads > _MOST_GROUP * config.num_key_value_heads:
        raise CannotLower(f"more than {_MOST_GROUP} query heads share a KV head")
    attention: Any = lowered.layers[0].attention
    if attention.head_dim not in _HEAD_DIMS:
        raise CannotLower(f"heads of {attention.head_dim} values do not fit the native kernels")
    return lowered


def qkv_pieces(attention: Any, q_rows: int, kv_rows: int) -> list[Piece]:
    """Queries, keys and values of a layer; `q_rows` and `kv_rows` are this rank's."""
    if hasattr(attention, "qkv_proj"):
        weight, bias = weights_of(attention.qkv_proj)
        sizes = [q_rows, kv_rows, kv_rows]
        biases = [None] * 3 if bias is None else torch.split(bias, sizes)
        return one_after_another(zip(split_rows(weight, sizes), biases, strict=True))
    return one_after_another(weights_of(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))


def gate_up_pieces(feed_forward: Any) -> list[Piece]:
    """Gate and up projections of a layer, alternating."""
    if hasattr(feed_forward, "gate_up_proj"):
        weight = feed_forward.gate_up_proj.stored
        gate, up = split_rows(weight, [weight.shape[0] // 2] * 2)
        return alternating((gate, None), (up, None))
    return alternating(weights_of(feed_forward.gate_proj), weights_of(feed_forward.up_proj))


def _check_widths(config: Any, world_size: int) -> None:
    inner = split_dimension(config.intermediate_size, world_size)
    if config.hidden_size % 2 or any(span.size % GATE_RUN for span in inner):
        raise CannotLower(
            f"a hidden size of {config.hidden_size} with an inner width of {config.intermediate_size} does not "
            "fit the native kernels"
        )


@dataclass(frozen=True)
class PackedLayer:
    """One layer; its numbers are those of `LoweredLayer`."""

    norms: dict[str, Tensor]
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    rotary: int
    window: int


@dataclass(frozen=True)
class PackedModel:
    """One rank's share of a model; its numbers are those of `Lowered`."""

    layers: list[PackedLayer]
    final_norm: Tensor
    embedding: PackedLinear
    """The head itself where they are tied."""
    head: PackedLinear
    frequencies: list[tuple[Tensor, float]]
    scalars: Scalars
    activation: Activation
    first_token: int
    """Token of the embedding's first row."""
    is_split: bool
    """Whether the ranks hold different rows of the embedding."""


def pack(library: Any, lowered: Lowered, layout: ShardLayout, threads: int) -> PackedModel:
    """Packs `lowered` with `threads` threads. Plain weights are let go as they are packed: the model that was lowered
    is of no use afterwards."""
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        packer = _Packer(library, layout, pool, threads)
        layers = [packer.layer(layer) for layer in lowered.layers]
        rows, first, split = vocabulary(lowered)
        head = packer.linear(one_after_another([weights_of(lowered.head)]))
        tied = rows is lowered.head.stored
        embedding = head if tied else packer.linear(one_after_another([(rows, None)]))
    release(lowered.head)
    release(lowered.embedding)
    return PackedModel(
        layers=layers,
        final_norm=lowered.final_norm,
        embedding=embedding,
        head=head,
        frequencies=lowered.frequencies,
        scalars=lowered.scalars,
        activation=lowered.activation,
        first_token=first,
        is_split=split,
    )


@dataclass(frozen=True)
class _Packer:
    library: Any
    layout: ShardLayout
    pool: ThreadPoolExecutor
    threads: int

    def linear(self, pieces: list[Any]) -> PackedLinear:
        return PackedLinear.of(self.library, pieces, self.pool, self.threads)

    def layer(self, layer: LoweredLayer) -> PackedLayer:
        attention: Any = layer.attention
        down: Any = layer.feed_forward.down_proj
        head_dim = self.layout.head_dim
        rows = (self.layout.q_heads.size * head_dim, self.layout.kv_heads.size * head_dim)
        packed = PackedLayer(
            norms=layer.norms,
            qkv=self.linear(qkv_pieces(attention, *rows)),
            output=self.linear(one_after_another([weights_of(attention.o_proj)])),
            gate_up=self.linear(gate_up_pieces(layer.feed_forward)),
            down=self.linear(one_after_another([weights_of(down)])),
            rotary=layer.rotary,
            window=layer.window,
        )
        for linear in linears_of(layer):
            release(linear)
        return packed

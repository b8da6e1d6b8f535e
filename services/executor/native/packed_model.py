"""A lowered model with its linears packed: all that the native kernels need of one rank's share, and its files.

model ──lower──▶ modules and numbers ──pack──▶ PackedModel ──▶ kernels
                                                 ▲  │
                                a later start ───┘  └──▶ weight_cache.py
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from services.executor.model.lowering import (
    Activation,
    Lowered,
    LoweredLayer,
    Scalars,
    let_go,
    linears_of,
    vocabulary,
)
from services.executor.model.sharding import ShardLayout
from services.executor.native.lowering import gate_up_pieces, qkv_pieces
from services.executor.native.packed import PackedLinear, one_after_another


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
        head = packer.linear(one_after_another([(lowered.head.weight, lowered.head.bias)]))
        tied = rows is lowered.head.weight
        embedding = head if tied else packer.linear(one_after_another([(rows, None)]))
    let_go(lowered.head)
    let_go(lowered.embedding)
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
            output=self.linear(one_after_another([(attention.o_proj.weight, attention.o_proj.bias)])),
            gate_up=self.linear(gate_up_pieces(layer.feed_forward)),
            down=self.linear(one_after_another([(down.weight, down.bias)])),
            rotary=layer.rotary,
            window=layer.window,
        )
        for linear in linears_of(layer):
            let_go(linear)
        return packed

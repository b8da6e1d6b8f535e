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
    split_evenly,
    split_rows,
)
from services.executor.cpu.quantized import PANEL
from services.executor.model import lowering
from services.executor.model.lowering import (
    Activation,
    CannotLower,
    Lowered,
    LoweredLayer,
    Routing,
    Scalars,
    Scores,
    expert_weights,
    linears_of,
    release,
    release_experts,
    vocabulary,
    weights_of,
)
from services.executor.native.library import Experts

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
SCORES: dict[Scores, int] = {"softmax": 0, "sigmoid": 1}
"""As `decoder.h` numbers them."""
_MOST_EXPERTS = 1024
"""As in `decoder.h`"""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
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
    for routing in (layer.routing for layer in lowered.layers if layer.routing):
        _check_experts(routing)
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
    for width in (width for name in _WIDTHS if (width := getattr(config, name, None))):
        inner = split_dimension(width, world_size)
        if config.hidden_size % 2 or any(span.size % GATE_RUN for span in inner):
            raise CannotLower(
                f"a hidden size of {config.hidden_size} with an inner width of {width} does not fit the native kernels"
            )


def _check_experts(routing: Routing) -> None:
    experts, hidden = routing.router.shape
    size = experts // routing.groups
    if experts > _MOST_EXPERTS or experts % routing.groups or not 0 < routing.chosen <= size * routing.among:
        raise CannotLower(f"{routing.chosen} of {experts} experts are beyond the native kernels")
    if hidden % PANEL:
        raise CannotLower(f"experts of {hidden} outputs do not fit the native kernels")


@dataclass(frozen=True)
class PackedExperts:
    """A mixture of experts; its numbers are those of `Routing`."""

    router: PackedLinear
    gate_up: PackedLinear
    """Of all experts, one after the other"""
    down: PackedLinear
    shared_gate: PackedLinear | None
    correction: Tensor | None
    count: int
    chosen: int
    scores: Scores
    normalised: bool
    groups: int
    among: int
    scale: float

    def describe(self) -> Experts:
        """The structure that the kernels take."""
        made = Experts(self.router.describe(), self.gate_up.describe(), self.down.describe())
        if self.shared_gate is not None:
            made.shared_gate = self.shared_gate.describe()
        if self.correction is not None:
            made.correction = self.correction.data_ptr()
        for name in ("count", "chosen", "normalised", "groups", "among", "scale"):
            setattr(made, name, getattr(self, name))
        made.scores = SCORES[self.scores]
        return made


@dataclass(frozen=True)
class PackedLayer:
    """One layer; its numbers are those of `LoweredLayer`."""

    norms: dict[str, Tensor]
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear | None
    """Of all rows; beside experts the shared one's, if there is one."""
    down: PackedLinear | None
    experts: PackedExperts | None
    rotary: int
    window: int

    @property
    def linears(self) -> list[PackedLinear]:
        experts = self.experts
        of_experts = [experts.router, experts.gate_up, experts.down, experts.shared_gate] if experts else []
        every = [self.qkv, self.output, self.gate_up, self.down, *of_experts]
        return [linear for linear in every if linear is not None]


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
        dense: Any = layer.feed_forward
        head_dim = self.layout.head_dim
        rows = (self.layout.q_heads.size * head_dim, self.layout.kv_heads.size * head_dim)
        packed = PackedLayer(
            norms=layer.norms,
            qkv=self.linear(qkv_pieces(attention, *rows)),
            output=self.linear(one_after_another([weights_of(attention.o_proj)])),
            gate_up=None if dense is None else self.linear(gate_up_pieces(dense)),
            down=None if dense is None else self.linear(one_after_another([weights_of(dense.down_proj)])),
            experts=None if layer.routing is None else self.experts(layer.routing),
            rotary=layer.rotary,
            window=layer.window,
        )
        for linear in linears_of(layer):
            release(linear)
        return packed

    def experts(self, routing: Routing) -> PackedExperts:
        count, shared = len(routing.router), routing.shared_gate
        sides = split_evenly(expert_weights(routing, "gate_up_proj"), 2 * count)
        downs = split_evenly(expert_weights(routing, "down_proj"), count)
        packed = PackedExperts(
            router=self.linear(one_after_another([(routing.router, None)])),
            gate_up=self._each(
                [
                    alternating((gate, None), (up, None))
                    for gate, up in zip(sides[::2], sides[1::2], strict=True)
                ]
            ),
            down=self._each([one_after_another([(down, None)]) for down in downs]),
            shared_gate=None if shared is None else self.linear(one_after_another([(shared, None)])),
            correction=routing.correction,
            count=count,
            **{name: getattr(routing, name) for name in _OF_ROUTING},
        )
        release_experts(routing)
        return packed

    def _each(self, experts: list[list[Piece]]) -> PackedLinear:
        return PackedLinear.of_experts(self.library, experts, self.pool, self.threads)


_OF_ROUTING = ("chosen", "scores", "normalised", "groups", "among", "scale")

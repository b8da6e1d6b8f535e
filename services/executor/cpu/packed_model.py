"""A lowered model with its linears packed: all that the native kernels need of one rank's share, in the order in which
they read it (see `native/gemm.h`); and what they ask of a model beyond its shape (`model/lowering.py`).

model ──lower──▶ modules and numbers ──pack──▶ PackedModel ──▶ kernels
                                                 ▲  │
                                a later start ───┘  └──▶ weight_cache.py
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.executor.core.sharding import HeadCounts, ShardLayout, split_dimension
from services.executor.cpu.packed_linear import (
    GATE_RUN,
    OutputSource,
    PackedLinear,
    PackedSegment,
    alternating,
    named,
    one_after_another,
    packing,
    plain_rows,
    rows_between,
    split_evenly,
    split_rows,
)
from services.executor.cpu.quantized import PANEL
from services.executor.families.family import Scores
from services.executor.model import lowering
from services.executor.model.lowered_experts import RouterConfig, Routing, expert_bias, expert_weights, release_experts
from services.executor.model.lowered_inputs import InputScales, ModelInputs
from services.executor.model.lowered_latent import Latent, LatentShape
from services.executor.model.lowered_recurrent import OutputRows, RecurrentKind, RecurrentShape
from services.executor.model.lowering import (
    Activation,
    CannotLower,
    Lowered,
    LoweredLayer,
    Scalars,
    Weights,
    down_of,
    fused_gate_up_of,
    gated_rows_of,
    linears_of,
    projections_of,
    release,
    vocabulary,
    weights_of,
)
from services.executor.model.parallel.layers import takes_turns
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.native import library as structures
from services.executor.native.library import HEADS, RzExperts, RzInputs, RzRecurrent

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}
SCORES: dict[Scores, int] = {"softmax": 0, "sigmoid": 1}
KINDS: dict[RecurrentKind, int] = {"delta": 0, "scan": 1, "short": 2}  # as `decoder.h` numbers them
LANES = 16  # values of a vector (`vector.h`): what recurrent states come in
_MOST_KEY_DIM, _MOST_TAPS = 256, 4  # as in `recurrent.c`
_MOST_EXPERTS = 1024  # as in `decoder.h`
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "shared_intermediate_size",
)
_HEAD_DIMS = frozenset(range(32, 513, 32))
_MOST_RANK, _MOST_LINE = 512, 576  # values of a latent, and of the line that it is kept in (`attention.h`)


def lower(model: Any, dtype: torch.dtype, world_size: int) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed.

    Raises `CannotLower` with the reason, on all `world_size` ranks or on none.
    """
    lowered = lowering.lower(model, dtype)
    config = model.config
    _check_widths(config, world_size)
    if any(layer.latent for layer in lowered.layers):
        _check_latents(lowered)
    else:
        _check_heads(lowered.heads)
    for layer in lowered.layers:
        _check_mixer(layer)
    for routing in (layer.routing for layer in lowered.layers if layer.routing):
        _check_experts(routing)
    if dtype is not torch.bfloat16:  # last, for a model that they do not compute is fp32 where PyTorch has no fast bf16
        raise CannotLower("only bf16 is computed by the native kernels")
    return lowered


def _check_heads(heads: list[HeadCounts]) -> None:
    if len(heads) > HEADS:
        raise CannotLower(f"the layers have {len(heads)} kinds of heads")
    for kind in heads:
        if kind.head_dim not in _HEAD_DIMS or kind.value_dim not in (0, kind.head_dim):
            raise CannotLower(f"heads of {kind.head_dim} values do not fit the native kernels")


def _check_latents(lowered: Lowered) -> None:
    for layer in lowered.layers:
        if layer.latent is None or layer.rotary < 0:
            raise CannotLower("only some layers keep lines for all heads, or turn them")
        shape, (frequencies, _) = layer.latent.shape, lowered.frequencies[layer.rotary]
        widths = (shape.plain, shape.rotated, shape.rank, shape.value_dim, shape.query_rank)
        if (
            any(width % PANEL for width in widths)
            or shape.rank > _MOST_RANK
            or shape.rank + shape.rotated > _MOST_LINE
            or shape.rotated != 2 * len(frequencies)
        ):
            raise CannotLower(
                f"latents of {shape.rank} + {shape.rotated} values, for heads of {shape.plain} and {shape.value_dim}, "
                "do not fit the native kernels"
            )


def _check_mixer(layer: LoweredLayer) -> None:
    """What is recurrent."""
    shape = None if layer.recurrent is None else layer.recurrent.shape
    if shape is not None and (
        shape.value_dim % LANES
        or shape.key_dim % LANES
        or shape.key_dim > _MOST_KEY_DIM
        or not 2 <= shape.taps <= _MOST_TAPS
    ):
        raise CannotLower(
            f"recurrent states of {shape.key_dim} x {shape.value_dim} values after a convolution over {shape.taps} "
            "tokens do not fit the native kernels"
        )


def rows_of(rows: OutputRows) -> Weights:
    """A linear's outputs [first, stop) and their bias."""
    weight, bias = weights_of(rows.linear)
    if rows.stop - rows.first == weight.shape[0]:
        return weight, bias
    own = rows_between(weight, rows.first, rows.stop)
    return own, None if bias is None else bias[rows.first : rows.stop]


def expert_parts(routing: Routing, leaf: str, parts: int) -> list[Weights]:
    """`leaf` of all experts, end to end, in equally many rows."""
    bias, weight = expert_bias(routing, leaf), expert_weights(routing, leaf)
    biases = [None] * parts if bias is None else bias.chunk(parts)
    weights = split_evenly(weight, parts)
    if isinstance(weight, QuantizedRows | DeferredRows) and takes_turns(routing.experts, leaf):
        each = [cast("QuantizedRows | DeferredRows", one) for one in split_evenly(weight, parts // 2)]
        weights = [expert.every(first, 2) for expert in each for first in (0, 1)]
    return list(zip(weights, biases, strict=True))


def _check_widths(config: Any, world_size: int) -> None:
    widths = [width for name in _WIDTHS if (width := getattr(config, name, None))]
    if getattr(config, "use_double_wide_mlp", False):
        widths.append(2 * config.intermediate_size)
    for width in widths:
        inner = split_dimension(width, world_size)
        if config.hidden_size % 2 or any(span.size % GATE_RUN for span in inner):
            raise CannotLower(
                f"a hidden size of {config.hidden_size} with an inner width of {width} does not fit the native kernels"
            )


def _check_experts(routing: Routing) -> None:
    (experts, hidden), choice = routing.router.shape, routing.choice
    size = experts // choice.groups
    if experts > _MOST_EXPERTS or experts % choice.groups or not 0 < choice.chosen <= size * choice.top_groups:
        raise CannotLower(f"{choice.chosen} of {experts} experts are beyond the native kernels")
    if hidden % PANEL:
        raise CannotLower(f"experts of {hidden} outputs do not fit the native kernels")


@dataclass(frozen=True)
class PackedExperts:
    """A mixture of experts."""

    router: PackedLinear
    gate_up: PackedLinear  # of all experts, one after the other
    down: PackedLinear
    shared_gate: PackedLinear | None
    correction: Tensor | None
    count: int
    choice: RouterConfig
    scales: Tensor | None
    norms: dict[str, Tensor]

    def describe(self) -> RzExperts:
        """The structure that the kernels take."""
        made = RzExperts(self.router.describe(), self.gate_up.describe(), self.down.describe())
        if self.shared_gate is not None:
            made.shared_gate = self.shared_gate.describe()
        if self.correction is not None:
            made.correction = self.correction.data_ptr()
        if self.scales is not None:
            made.scales = self.scales.data_ptr()
        for name, weight in self.norms.items():
            setattr(made, name, weight.data_ptr())
        for name, value in asdict(self.choice).items():
            setattr(made, name, SCORES[value] if name == "scores" else value)
        made.count = self.count
        return made


@dataclass(frozen=True)
class PackedRecurrent:
    """What a recurrent layer computes with between its products."""

    shape: RecurrentShape
    tensors: dict[str, Tensor]

    def describe(self, window: Tensor, state: Tensor | None) -> RzRecurrent:
        """The structure that the kernels take, over the slots' `window` [slots, channels, length] and `state`."""
        numbers = {**asdict(self.shape), "kind": KINDS[self.shape.kind]}
        made = RzRecurrent(
            **numbers,
            window_length=window.shape[2],
            window=window.data_ptr(),
            slot_stride=window.stride(0) * window.itemsize,
            **{name: tensor.data_ptr() for name, tensor in self.tensors.items()},
        )
        if state is not None:
            made.state = state.data_ptr()
        return made


@dataclass(frozen=True)
class PackedLatent:
    """What makes queries and outputs where all heads attend to one line."""

    shape: LatentShape
    query_b: PackedLinear | None
    keys: PackedLinear
    values: PackedLinear
    norms: dict[str, Tensor]
    module: str  # whose weight both are of, by its name in transformers' model

    @classmethod
    def of(cls, latent: Latent, packer: "_Packer") -> "PackedLatent":
        """`latent` without its weights, which it lets go of."""
        packed = cls(
            shape=latent.shape,
            query_b=None if latent.query_b is None else packer.whole(latent.query_b),
            keys=packer.linear(one_after_another([(latent.of_keys, None)]), plain=True),
            values=packer.linear(one_after_another([(latent.of_values, None)]), plain=True),
            norms=latent.norms,
            module=packer.names[latent.weight],
        )
        release(latent.weight)
        return packed

    @property
    def linears(self) -> list[PackedLinear]:
        return [self.keys, self.values, *([] if self.query_b is None else [self.query_b])]

    def describe(self) -> structures.RzLatent:
        """The structure that the kernels take."""
        made = structures.RzLatent(
            keys=self.keys.describe(),
            values=self.values.describe(),
            **asdict(self.shape),
            **{name: norm.data_ptr() for name, norm in self.norms.items()},
        )
        if self.query_b is not None:
            made.query_b = self.query_b.describe()
        return made


@dataclass(frozen=True)
class PackedLayer:
    """One layer; its numbers are those of `LoweredLayer`."""

    norms: dict[str, Tensor]
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear | None  # of all rows; beside experts the shared one's, if there is one
    down: PackedLinear | None
    experts: PackedExperts | None
    rotary: int
    window: int
    page: int
    heads: int
    reads_only: bool
    keys_are_values: bool
    norms_values: bool
    scale: float
    gated: bool
    latent: PackedLatent | None
    recurrent: PackedRecurrent | None
    input_gate: PackedLinear | None
    input_projection: PackedLinear | None

    @property
    def linears(self) -> list[PackedLinear]:
        experts = self.experts
        of_experts = [experts.router, experts.gate_up, experts.down, experts.shared_gate] if experts else []
        of_input = [self.input_gate, self.input_projection]
        of_latent = [] if self.latent is None else self.latent.linears
        every = [self.qkv, self.output, self.gate_up, self.down, *of_latent, *of_input, *of_experts]
        return [linear for linear in every if linear is not None]


@dataclass(frozen=True)
class PackedInputs:
    """What makes the layers' inputs."""

    # One output per token of the embedding's; bf16 is not packed, as nothing is multiplied with it.
    table: PackedLinear
    projection: PackedLinear
    norm: Tensor
    scales: InputScales

    def describe(self) -> RzInputs:
        """The structure that the kernels take."""
        return RzInputs(
            self.norm.shape[0],
            self.table.describe(),
            self.projection.describe(),
            self.norm.data_ptr(),
            **asdict(self.scales),
        )


@dataclass(frozen=True)
class PackedModel:
    """One rank's share of a model; its numbers are those of `Lowered`."""

    heads: list[HeadCounts]
    layers: list[PackedLayer]
    final_norm: Tensor
    embedding: PackedLinear  # the head itself where they are tied
    head: PackedLinear
    frequencies: list[tuple[Tensor, float]]
    scalars: Scalars
    activation: Activation
    first_token: int  # token of the embedding's first row
    is_split: bool  # whether the ranks hold different rows of the embedding
    inputs: PackedInputs | None


def pack(library: Any, lowered: Lowered, layout: ShardLayout, threads: int) -> PackedModel:
    """Packs `lowered` with `threads` threads. Plain weights are let go as they are packed: the model that was lowered
    is of no use afterwards."""
    with packing(threads) as pool:
        layouts = [ShardLayout.of(heads, layout.world_size, layout.rank) for heads in lowered.heads]
        packer = _Packer(library, layouts, pool, threads, lowered.names)
        layers = [packer.layer(layer, lowered.family.gated) for layer in lowered.layers]
        rows, first, split = vocabulary(lowered)
        head = packer.linear(one_after_another([weights_of(lowered.head)]))
        tied = rows is lowered.head.stored
        embedding = head if tied else packer.linear(one_after_another([(rows, None)]))
        inputs = None if lowered.inputs is None else packer.inputs(lowered.inputs)
    release(lowered.head)
    release(lowered.embedding)
    return PackedModel(
        heads=lowered.heads,
        layers=layers,
        final_norm=lowered.final_norm,
        embedding=embedding,
        head=head,
        frequencies=lowered.frequencies,
        scalars=lowered.scalars,
        activation=lowered.activation,
        first_token=first,
        is_split=split,
        inputs=inputs,
    )


@dataclass(frozen=True)
class _Packer:
    library: Any
    layouts: list[ShardLayout]  # of each kind of heads
    pool: ThreadPoolExecutor
    threads: int
    names: dict[nn.Module, str]  # of the model's modules

    def linear(self, pieces: list[Any], plain: bool = False) -> PackedLinear:
        return PackedLinear.of(self.library, pieces, self.pool, self.threads, plain)

    def source(self, module: nn.Module, first: int = 0) -> OutputSource:
        return OutputSource(self.names[module], first)

    def whole(self, linear: Any) -> PackedLinear:
        return self.linear(self.in_turn([linear]))

    def in_turn(self, linears: Sequence[Any]) -> list[PackedSegment]:
        """Whole linears, end to end."""
        return named(one_after_another(map(weights_of, linears)), map(self.source, linears))

    def inputs(self, inputs: ModelInputs) -> PackedInputs:
        rows = inputs.table.stored
        packed = PackedInputs(
            table=plain_rows(rows) if isinstance(rows, Tensor) else self.linear(one_after_another([(rows, None)])),
            projection=self.linear(
                named(one_after_another([(inputs.projection.weight.detach(), None)]), [self.source(inputs.projection)])
            ),
            norm=inputs.norm,
            scales=inputs.scales,
        )
        release(inputs.table)
        release(inputs.projection)
        return packed

    def layer(self, layer: LoweredLayer, gated: bool) -> PackedLayer:
        attention: Any = layer.attention
        recurrent, dense = layer.recurrent, cast(Any, layer.feed_forward)
        output = attention.o_proj if recurrent is None else recurrent.output
        packed = PackedLayer(
            norms=layer.norms,
            qkv=self.linear(self.projected(layer, gated)),
            output=self.whole(output),
            gate_up=None if dense is None else self.linear(self.gate_up(dense)),
            down=None if dense is None else self.whole(down_of(dense)),
            experts=None if layer.routing is None else self.experts(layer.routing),
            rotary=layer.rotary,
            window=layer.window,
            page=layer.page,
            heads=layer.heads,
            reads_only=layer.reads_only,
            keys_are_values=layer.keys_are_values,
            norms_values=layer.norms_values,
            scale=layer.scale,
            gated=gated and recurrent is None,
            latent=None if layer.latent is None else PackedLatent.of(layer.latent, self),
            recurrent=None if recurrent is None else PackedRecurrent(recurrent.shape, recurrent.tensors),
            input_gate=None if layer.input is None else self.whole(layer.input.gate),
            input_projection=None if layer.input is None else self.whole(layer.input.projection),
        )
        for linear in linears_of(layer):
            release(linear)
        return packed

    def projected(self, layer: LoweredLayer, gated: bool) -> list[PackedSegment]:
        """What a layer's first product gives."""
        if layer.recurrent is not None:
            return self.joined(layer.recurrent.inputs)
        if layer.latent is not None:
            return self.joined(layer.latent.inputs)
        if gated:
            return self.joined(gated_rows_of(layer.attention))
        attention: Any = layer.attention
        layout = self.layouts[layer.heads]
        q_rows, kv_rows = layout.q_heads.size * layout.head_dim, layout.kv_heads.size * layout.head_dim
        if not hasattr(attention, "qkv_proj"):
            return self.in_turn([getattr(attention, name) for name in projections_of(attention)])
        (weight, bias), sizes = weights_of(attention.qkv_proj), [q_rows, kv_rows, kv_rows]
        biases = [None] * 3 if bias is None else torch.split(bias, sizes)
        firsts = (0, q_rows, q_rows + kv_rows)
        sources = (self.source(attention.qkv_proj, first) for first in firsts)
        return named(one_after_another(zip(split_rows(weight, sizes), biases, strict=True)), sources)

    def joined(self, inputs: list[OutputRows]) -> list[PackedSegment]:
        sources = (self.source(rows.linear, rows.first) for rows in inputs)
        return named(one_after_another(map(rows_of, inputs)), sources)

    def gate_up(self, feed_forward: Any) -> list[PackedSegment]:
        """Gate and up projections of a layer, alternating."""
        if (fused := fused_gate_up_of(feed_forward)) is not None:
            gate, up = split_evenly(fused.stored, 2)
            sources = [self.source(fused), self.source(fused, gate.shape[0])]
            return named(alternating((gate, None), (up, None)), sources)
        linears = (feed_forward.gate_proj, feed_forward.up_proj)
        return named(alternating(*map(weights_of, linears)), map(self.source, linears))

    def experts(self, routing: Routing) -> PackedExperts:
        count, shared = len(routing.router), routing.shared_gate
        sides = expert_parts(routing, "gate_up_proj", 2 * count)
        downs = expert_parts(routing, "down_proj", count)
        module, experts = self.names[routing.experts], cast(Any, routing.experts)
        width, turns = sides[0][0].shape[0], not experts.is_concatenated
        gate_up = [
            OutputSource(f"{module}.gate_up_proj", 0, 1 + turns),
            OutputSource(f"{module}.gate_up_proj", 1 if turns else width, 1 + turns),
        ]
        packed = PackedExperts(
            router=self.linear(self.router(routing)),
            gate_up=self._each(
                [named(alternating(gate, up), gate_up) for gate, up in zip(sides[::2], sides[1::2], strict=True)]
            ),
            down=self._each(
                [named(one_after_another([down]), [OutputSource(f"{module}.down_proj")]) for down in downs]
            ),
            shared_gate=None if shared is None else self.shared_gate(shared, routing),
            correction=routing.correction,
            count=count,
            choice=routing.choice,
            scales=routing.scales,
            norms=routing.norms,
        )
        release_experts(routing)
        return packed

    def router(self, routing: Routing) -> list[PackedSegment]:
        """A router's weight as bf16, and what it has beyond, where it is float32."""
        assert routing.router_module is not None, "it has a weight"
        weight, high = routing.router, routing.router.bfloat16()
        beyond = [] if weight.dtype is torch.bfloat16 else [((weight - high.float()).bfloat16(), None)]
        first, *others = one_after_another([(high, routing.router_bias), *beyond])
        return [*named([first], [self.source(routing.router_module)]), *others]

    def shared_gate(self, weight: Tensor, routing: Routing) -> PackedLinear:
        assert routing.shared_gate_module is not None, "it has a weight"
        source = self.source(routing.shared_gate_module)
        return self.linear(named(one_after_another([(weight, None)]), [source]))

    def _each(self, experts: list[list[PackedSegment]]) -> PackedLinear:
        return PackedLinear.of_experts(self.library, experts, self.pool, self.threads)

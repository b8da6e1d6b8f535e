"""Splits a transformers model over the ranks of a ring, after its parallel plan (see `plans.py`).

transformers' own tensor-parallel runtime is not used, because it needs heads that divide evenly. Modules
keep transformers' code and names; their linear layers, norms over heads and experts are replaced by, or
made, this rank's share, and their head counts become this rank's.

A rank's share of fused projections, in rows of the weight (outputs of the projection), head size d:

    blocks      [q0 q1 q2 q3 | k0 k1 | v0 v1]             rank 0 of 2: q0-q1, k0, v0
    by group    [q0 q1 k0 v0 | q2 q3 k1 v1]               rank 0 of 2: the first group
    halves      [gate | up]                               the same span of each

Of a mixture of experts every rank holds a span of the inner width of each expert. transformers keeps the experts of a
layer as two parameters of three dimensions. Their layout is named by the module itself:

    gate_up_proj   [experts, 2 * inner, hidden]     is_transposed: [experts, hidden, 2 * inner]
                    [gate | up] along it            not is_concatenated: gate and up values take turns
    down_proj      [experts, hidden, inner]         is_transposed: [experts, inner, hidden]

The router is whole on every rank, so all ranks choose the same experts. What they compute is summed once.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout, Span
from services.executor.model.attention import WINDOW_ATTRIBUTE
from services.executor.model.parallel.layers import (
    ColumnParallelLinear,
    LinearShard,
    RowParallelLinear,
    TensorSlice,
    VocabParallelEmbedding,
    VocabParallelHead,
    WideNorm,
    held_transposed,
    hold,
    keep_head_norms,
    leave_out,
    piece_of,
)
from services.executor.model.parallel.plans import WINDOW_IN_MASK, Plan, Style, as_regex, plan_for
from services.executor.model.parallel.rewiring import rewire_attention
from shared.errors import ModelLoadError


def halves(span: Span, width: int) -> tuple[Span, ...]:
    """`span` of each of two projections of `width` that stand one after the other."""
    return merged([span, shifted(span, width)])


def blocks(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [all q | all k | all v]."""
    size, total = layout.head_dim, layout.total
    keys = layout.kv_heads.scaled(size)
    first_key = total.q_heads * size
    first_value = first_key + total.kv_heads * size
    return merged(
        [layout.q_heads.scaled(size), shifted(keys, first_key), shifted(keys, first_value)],
    )


def by_group(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [queries of KV head 0, its key, its value | the same of KV head 1 | ...]."""
    size = layout.head_dim
    group = layout.total.q_heads // layout.total.kv_heads
    spans = []
    for index in range(layout.kv_heads.size):
        head = layout.kv_heads.start + index
        first = layout.q_heads.start + index * layout.q_per_kv - head * group
        start = head * (group + 2)
        spans.append(Span(start + first, start + first + layout.q_per_kv).scaled(size))
        spans.append(Span(start + group, start + group + 2).scaled(size))
    return merged(spans)


def shifted(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """The same rows with neighbours joined, so that they are read at once."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


_PARAMETERS = frozenset(
    {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
)

_GROUPED_MULTIPLE = 8
"""torch's grouped product takes rows of a multiple of 16 bytes; narrower experts are multiplied one by one."""


def split_experts(experts: Any, name: str, layout: ShardLayout, collectives: Collectives) -> None:
    """Makes the module `experts` (called `name`) hold this rank's span, in place.

    Raises `ModelLoadError` when it holds its experts in a way that is not known.
    """
    held = {leaf for leaf, _ in experts.named_parameters()}
    if "down_proj" not in held or not held <= _PARAMETERS or not hasattr(experts, "is_transposed"):
        raise ModelLoadError(
            f"The experts {name} hold {', '.join(sorted(held)) or 'nothing'}, a form that is not served; "
            "choose a model of another architecture."
        )
    transposed = bool(experts.is_transposed)
    inner_dim = 1 if transposed else 2
    inner = experts.down_proj.shape[inner_dim]
    span = layout.dimension(inner)
    if span.size % _GROUPED_MULTIPLE:
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation = "eager"  # noqa: SLF001  # no public name
    if layout.world_size == 1:
        return
    _hold_inputs(experts, span, inner, transposed)
    hold(experts, "down_proj", experts.down_proj, TensorSlice(inner_dim, (span,), inner))
    if "down_proj_bias" in held and layout.rank > 0:
        _drop_bias(experts)
    experts.register_forward_hook(_sum_over_ranks(collectives))


def _hold_inputs(experts: Any, span: Span, inner: int, transposed: bool) -> None:
    """The share of the projections into the experts: gate and up, or up alone."""
    gated = hasattr(experts, "gate_up_proj")
    leaf, full = ("gate_up_proj", 2 * inner) if gated else ("up_proj", inner)
    if not gated:
        spans: tuple[Span, ...] = (span,)
    elif experts.is_concatenated:
        spans = halves(span, inner)
    else:
        spans = (span.scaled(2),)
    hold(experts, leaf, getattr(experts, leaf), TensorSlice(2 if transposed else 1, spans, full))
    bias = f"{leaf}_bias"
    if hasattr(experts, bias):
        hold(experts, bias, getattr(experts, bias), TensorSlice(1, spans, full))


def _drop_bias(experts: Any) -> None:
    """Zeros in place of the outputs' bias, which rank 0 alone adds: on every rank it would count once for each."""
    bias: Tensor = experts.down_proj_bias
    del experts.down_proj_bias
    experts.register_buffer("down_proj_bias", torch.zeros(bias.shape, dtype=bias.dtype), persistent=False)
    leave_out(experts, "down_proj_bias")


def _sum_over_ranks(collectives: Collectives):  # type: ignore[no-untyped-def]
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return collectives.all_reduce(output.contiguous())

    return hook


_HEAD_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})
_LINEAR_KINDS = frozenset({"Linear", "FalconLinear"})
_CONV1D = "Conv1D"
"""GPT-2's linear layer, whose weight is [in, out]."""

_SCALED_EMBEDDING = "TextScaledWordEmbedding"
"""Gemma's embedding, which multiplies by its `embed_scale`."""

_ATTENTION = frozenset({Style.QUERY, Style.KEY_VALUE, Style.OUTPUT, Style.QKV_BLOCKS, Style.QKV_BY_GROUP})
_FUSED = frozenset({Style.QKV_BLOCKS, Style.QKV_BY_GROUP})
_ROWS = frozenset({Style.ROW, Style.OUTPUT})
_Q_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_Q_WIDTHS = ("split_size", "embed_dim")
_KV_WIDTHS = ("kv_dim",)


def apply_plan(model: nn.Module, config: Any, layout: ShardLayout, collectives: Collectives) -> None:
    """Replaces `model`'s linear and embedding layers by this rank's share of them, in place.

    `model` is a transformers causal language model with its parameters on the meta device; `config`
    its text configuration. Raises `ModelLoadError` where the plan cannot be followed.
    """
    tied = _tied_head(model)
    base: nn.Module = model.base_model  # type: ignore[assignment]
    splitter = _Splitter(base, layout, collectives)
    attentions: dict[str, bool] = {}
    """Attention module -> whether its projections are fused."""
    for name, style in _planned(base, plan_for(config)):
        if style in _ATTENTION:
            parent = name.rpartition(".")[0]
            attentions[parent] = attentions.get(parent, False) or style in _FUSED
        splitter.split(name, style)
    modules = {name: base.get_submodule(name) for name in attentions}
    _check_layers(modules, config)
    for name, attention in modules.items():
        _localise_attention(attention, layout, attentions[name])
        _check_whole(attention, name, layout)
        if config.model_type in WINDOW_IN_MASK:
            setattr(attention, WINDOW_ATTRIBUTE, config.sliding_window)
    rewire_attention(model, config, modules, layout)
    _split_vocabulary(model, layout, collectives, tied)


def _planned(base: nn.Module, plan: Plan) -> Iterator[tuple[str, Style]]:
    """(name, style) of each module, and of each parameter of its own right, that the plan names."""
    patterns = [(as_regex(key), style) for key, style in plan.items() if style is not Style.WHOLE]
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    for name in names:
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is not None:
            yield name, style


class _Splitter:
    """Makes one module at a time this rank's share."""

    def __init__(self, base: nn.Module, layout: ShardLayout, collectives: Collectives):
        self._base = base
        self._layout = layout
        self._collectives = collectives

    def split(self, name: str, style: Style) -> None:
        parent, leaf = _parent(self._base, name)
        module = getattr(parent, leaf)
        layout = self._layout
        if style is Style.EXPERTS:
            if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
                split_experts(module, name, layout, self._collectives)
        elif style is Style.QUERY_HEAD_SCALARS:
            hold(parent, leaf, module, TensorSlice(0, (layout.q_heads,), layout.total.q_heads))
        elif style in (Style.QUERY_HEAD_NORM, Style.KEY_HEAD_NORM):
            heads, total = self._heads(style is Style.QUERY_HEAD_NORM)
            keep_head_norms(module, name, heads, total)
        elif style in (Style.QUERY_WIDE_NORM, Style.KEY_WIDE_NORM):
            if layout.world_size > 1:
                setattr(parent, leaf, self._wide_norm(module, name, style is Style.QUERY_WIDE_NORM))
        else:
            setattr(parent, leaf, self._linear(module, name, style))

    def _heads(self, queries: bool) -> tuple[Span, int]:
        """(this rank's heads, heads in all)."""
        layout = self._layout
        if queries:
            return layout.q_heads, layout.total.q_heads
        return layout.kv_heads, layout.total.kv_heads

    def _wide_norm(self, norm: nn.Module, name: str, queries: bool) -> nn.Module:
        heads, total = self._heads(queries)
        width = norm.weight.shape[0]  # type: ignore[index]
        _check_width(name, int(width), total * self._layout.head_dim)
        span = heads.scaled(self._layout.head_dim)
        counted = self._layout.output_heads if queries else self._layout.counted_kv_heads
        return WideNorm(norm, span, counted.scaled(self._layout.head_dim), self._collectives)

    def _linear(self, linear: Any, name: str, style: Style) -> nn.Module:
        kind = type(linear).__name__
        if kind not in _LINEAR_KINDS and kind != _CONV1D:
            raise ModelLoadError(
                f"The parallel plan splits {name}, which is a {kind} and not a plain linear layer; "
                "choose a model of another architecture or an unquantised checkpoint."
            )
        if kind != _CONV1D:
            return self._share(linear, name, style)
        inputs, outputs = linear.weight.shape
        same = nn.Linear(inputs, outputs, device="meta", dtype=linear.weight.dtype)
        shard = self._share(same, name, style)
        held_transposed(shard, "weight")
        return shard

    def _share(self, linear: nn.Linear, name: str, style: Style) -> LinearShard:
        if style not in _ROWS:
            return ColumnParallelLinear(linear, *self._spans(name, style, linear.out_features))
        span, skip = self._spans(name, style, linear.in_features)[0], 0
        if style is Style.OUTPUT:
            skip = span.start - self._layout.q_heads.scaled(self._layout.head_dim).start
        return RowParallelLinear(linear, span, self._collectives, skip)

    def _spans(self, name: str, style: Style, width: int) -> tuple[Span, ...]:
        """What this rank holds of a dimension of `width`."""
        layout, total = self._layout, self._layout.total
        if style in (Style.COLUMN, Style.ROW):
            return (layout.dimension(width),)
        if style is Style.GATE_UP:
            return halves(layout.dimension(width // 2), width // 2)
        if style in _FUSED:
            _check_width(name, width, (total.q_heads + 2 * total.kv_heads) * layout.head_dim)
            return blocks(layout) if style is Style.QKV_BLOCKS else by_group(layout)
        heads, count = self._heads(style is not Style.KEY_VALUE)
        if style is Style.OUTPUT:
            heads = layout.output_heads
        _check_width(name, width, count * layout.head_dim)
        return (heads.scaled(layout.head_dim),)


def _check_width(name: str, width: int, expected: int) -> None:
    if width != expected:
        raise ModelLoadError(
            f"The attention projection or norm {name} is {width} wide where the heads in config.json make "
            f"{expected}; models whose heads differ in shape are not served."
        )


def _parent(base: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return base.get_submodule(path), leaf


def _localise_attention(attention: Any, layout: ShardLayout, is_fused: bool) -> None:
    """Makes the head counts that the module's code reads this rank's."""
    size = layout.head_dim
    _localise(attention, _Q_HEADS, layout.total.q_heads, layout.q_heads.size)
    _localise(attention, _KV_HEADS, layout.total.kv_heads, layout.kv_heads.size)
    attention.num_key_value_groups = layout.q_per_kv
    if not is_fused:
        return
    _localise(attention, _Q_WIDTHS, layout.total.q_heads * size, layout.q_heads.size * size)
    _localise(attention, _KV_WIDTHS, layout.total.kv_heads * size, layout.kv_heads.size * size)
    if hasattr(attention, "config"):
        # Some find their heads in the configuration, which other modules share and which speaks of the whole.
        attention.config = copy.copy(attention.config)
        _localise(attention.config, _Q_HEADS, layout.total.q_heads, layout.q_heads.size)


def _localise(owner: Any, names: tuple[str, ...], whole: int, local: int) -> None:
    for name in names:
        if getattr(owner, name, None) == whole:
            setattr(owner, name, local)


def _check_whole(attention: nn.Module, name: str, layout: ShardLayout) -> None:
    """Refuses an attention in which a parameter that no rank splits spans several heads."""
    if layout.world_size == 1:
        return
    for parameter_name, parameter in attention.named_parameters():
        path, _, leaf = parameter_name.rpartition(".")
        owner = attention.get_submodule(path)
        if piece_of(owner, leaf) is None and tuple(parameter.shape) not in ((layout.head_dim,), (1,), ()):
            raise ModelLoadError(
                f"The parameter {name}.{parameter_name} spans several heads and cannot be split over ranks; "
                "serve this model with --tp 1."
            )


def _check_layers(attentions: Mapping[str, nn.Module], config: Any) -> None:
    layers = sorted(getattr(attention, "layer_idx", -1) for attention in attentions.values())
    if layers != list(range(config.num_hidden_layers)):
        raise ModelLoadError(
            f"The architecture {config.model_type!r} has {len(attentions)} attention layers that can be served "
            f"out of {config.num_hidden_layers} layers; choose a model with plain attention in every layer."
        )


def _tied_head(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _split_vocabulary(model: Any, layout: ShardLayout, collectives: Collectives, tied: bool) -> None:
    output = model.get_output_embeddings()
    head_name = _name_of(model, output)
    style = str((getattr(model, "_tp_plan", None) or {}).get(head_name, "colwise_gather_output"))
    if style not in _HEAD_STYLES or type(output) is not nn.Linear:
        raise ModelLoadError(
            f"The model's output layer {head_name} is a {type(output).__name__} of the parallel style {style!r}, "
            "which is not served; choose a model of another architecture."
        )
    head = VocabParallelHead(output, layout.rank, layout.world_size)
    embedding = model.get_input_embeddings()
    # An embedding that does more than look up and scale keeps all rows on every rank.
    if type(embedding) is nn.Embedding or type(embedding).__name__.endswith(_SCALED_EMBEDDING):
        split = VocabParallelEmbedding(embedding, layout.dimension(embedding.num_embeddings), collectives)
        _replace(model, _name_of(model, embedding), split)
        if tied:
            head.weight = split.weight
    _replace(model, head_name, head)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, leaf = _parent(model, name)
    setattr(parent, leaf, module)

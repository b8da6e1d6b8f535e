"""Splits a transformers model over the ranks of a ring, after its parallel plan (see `plans.py`).

transformers' own tensor-parallel runtime is not used, because it needs heads that divide evenly. Modules
keep transformers' code and names; their linear layers, norms over heads and experts are replaced by, or
made, this rank's share (experts: `experts.py`), and their head counts become this rank's.

A rank's share of fused projections, in rows of the weight (outputs of the projection), head size d:

    blocks      [q0 q1 q2 q3 | k0 k1 | v0 v1]             rank 0 of 2: q0-q1, k0, v0
    by group    [q0 q1 k0 v0 | q2 q3 k1 v1]               rank 0 of 2: the first group
    halves      [gate | up]                               the same span of each
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import nn

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates, page_of, slot_of
from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.families.plans import Plan, Style
from services.executor.families.registry import family_of
from services.executor.model.attention import PAGE_ATTRIBUTE, READS_ATTRIBUTE, WINDOW_ATTRIBUTE
from services.executor.model.layer_states import layer_states
from services.executor.model.parallel.experts import split_experts, split_stacks
from services.executor.model.parallel.feed_forward import adapt_feed_forwards
from services.executor.model.parallel.latent import keep_latent
from services.executor.model.parallel.layers import (
    ColumnParallelLinear,
    LinearShard,
    RowParallelLinear,
    TensorSlice,
    VocabParallelEmbedding,
    VocabParallelHead,
    WideNorm,
    halves,
    held_transposed,
    hold,
    keep_head_norms,
    merged,
    piece_of,
    shifted,
)
from services.executor.model.parallel.mixers.split import MixerSplit, split_mixer
from services.executor.model.parallel.module_patches import (
    compute_chosen_logits,
    rewire_attention,
    scale_queries_by_position,
)
from services.executor.model.parallel.plans import as_regex, plan_for
from services.executor.model.recurrent import CurrentStep, keep_in_slots
from services.executor.model.states.base import StatePlace, layer_layouts
from services.executor.model.states.catalog import state_kind
from shared.errors import ModelLoadError


def blocks(layout: ShardLayout) -> tuple[ShardRange, ...]:
    """This rank's rows of [all q | all k | all v]."""
    size, total = layout.head_dim, layout.total
    keys = layout.kv_heads.scaled(size)
    first_key = total.q_heads * size
    first_value = first_key + total.kv_heads * size
    return merged([layout.q_heads.scaled(size), shifted(keys, first_key), shifted(keys, first_value)])


def by_group(layout: ShardLayout) -> tuple[ShardRange, ...]:
    """This rank's rows of [queries of KV head 0, its key, its value | the same of KV head 1 | ...]."""
    size = layout.head_dim
    group = layout.total.q_heads // layout.total.kv_heads
    spans = []
    for index in range(layout.kv_heads.size):
        head = layout.kv_heads.start + index
        first = layout.q_heads.start + index * layout.q_per_kv - head * group
        start = head * (group + 2)
        spans.append(ShardRange(start + first, start + first + layout.q_per_kv).scaled(size))
        spans.append(ShardRange(start + group, start + group + 2).scaled(size))
    return merged(spans)


def by_fourth(layout: ShardLayout) -> tuple[ShardRange, ...]:
    """This rank's q, k and v among [q of a fourth of the heads | their v | their k | q of the next fourth | ...].

    Raises `ModelLoadError` where there are no four equal parts.
    """
    heads = layout.total.q_heads
    fourth, rest = divmod(heads, 4)
    if rest or heads != layout.total.kv_heads:
        raise ModelLoadError(
            f"The model's {heads} attention heads do not make four equal parts, as its projection has them; "
            "its config.json is damaged, fetch the model again."
        )
    spans = []
    for part in (0, 2, 1):  # q, k, v
        for first in range(0, heads, fourth):
            held = ShardRange(max(first, layout.q_heads.start), min(first + fourth, layout.q_heads.stop))
            if held.start < held.stop:
                spans.append(shifted(held, 2 * first + part * fourth).scaled(layout.head_dim))
    return tuple(spans)


_HEAD_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})
_LINEAR_KINDS = frozenset({"Linear", "FalconLinear"})
_CONV1D = "Conv1D"  # GPT-2's linear layer, whose weight is [in, out]

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
# How the embeddings are called that multiply by their `embed_scale`.
_SCALED_EMBEDDING = "ScaledWordEmbedding"

# Qwen 4's, of hashes of a token and those before it: larger than the rest of the model.
_NGRAM_EMBEDDING = ".ngram_embedding"

_WIDE_NORMS = frozenset({Style.QUERY_WIDE_NORM, Style.KEY_WIDE_NORM, Style.INNER_WIDE_NORM})
_FUSED = {Style.QKV_BLOCKS: blocks, Style.QKV_BY_GROUP: by_group, Style.QVK_BY_FOURTH: by_fourth}
_PAIRS = frozenset({Style.QUERY_PAIRS, Style.KEY_VALUE_PAIRS, Style.KEYS_VALUES})
_OF_KEYS = frozenset(
    {Style.KEY_VALUE, Style.KEYS_VALUES, Style.KEY_VALUE_PAIRS, Style.KEY_VALUE_INPUT, Style.KEY_VALUE_ADAPTER}
)
_ATTENTION = frozenset({Style.QUERY, Style.GATED_QUERY, Style.KEY_VALUE, Style.OUTPUT, *_PAIRS, *_FUSED})
_ROWS = frozenset({Style.ROW, Style.ROW_OF_WHOLE, Style.OUTPUT, Style.KEY_VALUE_INPUT})
# Parameters of attention that are the same for each head, or come behind their sum.
_OF_ALL_HEADS = frozenset({"dense_bias", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"})
_Q_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_Q_WIDTHS = ("split_size", "embed_dim", "hidden_size")
_KV_WIDTHS = ("kv_dim",)


def apply_plan(model: nn.Module, config: Any, layout: ShardLayout, collectives: Collectives) -> None:
    """Replaces `model`'s linear and embedding layers by this rank's share of them, in place.

    `model` is a transformers causal language model with its parameters on the meta device; `config`
    its text configuration. Raises `ModelLoadError` where the plan cannot be followed.
    """
    tied = _tied_head(model)
    base: nn.Module = model.base_model  # type: ignore[assignment]
    layouts, repeated = layer_layouts(config, layout), _repeated(base)
    adapt_feed_forwards(model, config, collectives)
    splitter = _Splitter(base, layout, layouts, collectives)
    attentions: dict[str, bool] = {}  # attention module -> whether its projections are fused
    plan, states = plan_for(config), layer_states(config, layout)
    mixers = _mixers(base, config, states)
    for name, style in _planned(base, plan, mixers):
        if style in _ATTENTION:
            parent = name.rpartition(".")[0]
            attentions[parent] = attentions.get(parent, False) or style in _FUSED
        splitter.split(name, style)
    modules = {name: base.get_submodule(name) for name in attentions}
    for name, attention in modules.items():
        if getattr(attention, "layer_idx", None) in (None, -1):
            attention.layer_idx = _layer_of(name)  # type: ignore[assignment]
    _check_layers(modules, config, states)
    _split_mixers(model, mixers, config, layout, states, collectives)
    for name, attention in modules.items():
        layer: int = attention.layer_idx  # type: ignore[assignment]
        _localise_attention(attention, layouts[layer], attentions[name])
        _check_whole(attention, name, layouts[layer], plan)
        _attend_to_pages(attention, config, states, layer, layouts[layer])
    rewire_attention(model, config, modules, layout)
    for name, first in repeated.items():
        base.set_submodule(name, base.get_submodule(first))
    _split_vocabulary(model, layout, collectives, tied)
    compute_chosen_logits(model)


def _attend_to_pages(attention: Any, config: Any, states: LayerStates, layer: int, layout: ShardLayout) -> None:
    """Tells `attention` which page layers are its own, and what of them it reaches."""
    page = page_of(states, layer)
    setattr(attention, PAGE_ATTRIBUTE, page)
    if states[layer].reads is not None:
        setattr(attention, READS_ATTRIBUTE, True)
    if family_of(config.model_type).window_in_mask:
        setattr(attention, WINDOW_ATTRIBUTE, config.sliding_window)
    if getattr(attention, "attn_temperature_tuning", False):
        scale_queries_by_position(attention)
    kind = state_kind(config.model_type)
    if kind is not None and kind.attention:
        resolve_name(kind.attention)(attention, _place(config, states, layer, layout))


def _place(config: Any, states: LayerStates, layer: int, layout: ShardLayout) -> StatePlace:
    """`layout`: of the layer's attention."""
    return StatePlace(config, layout, states[layer], page_of(states, layer), slot_of(states, layer))


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    assert found is not None, "layers are numbered"
    return int(found[1])


def _repeated(base: nn.Module) -> dict[str, str]:
    """Modules that have the parameters of another before them, and that one's name: Zamba calls one block of attention
    and feed-forward in several layers. A rank holds and packs them once."""
    first: dict[tuple[int, ...], str] = {}
    repeated = {}
    for name, module in base.named_modules():
        own = tuple(id(parameter) for parameter in module.parameters(recurse=False))
        if own and first.setdefault(own, name) != name:
            repeated[name] = first[own]
    return repeated


def _planned(base: nn.Module, plan: Plan, mixers: Iterable[str]) -> Iterator[tuple[str, Style]]:
    """(name, style) of each module, and of each parameter of its own right, that the plan names. `mixers` have splits
    of their own, and may call their parts as attention does."""
    patterns = [(as_regex(key), style) for key, style in plan.items() if style is not Style.WHOLE]
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    for name in names:
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is not None and not any(name.startswith(f"{mixer}.") for mixer in mixers):
            yield name, style


class _Splitter:
    """Makes one module at a time this rank's share."""

    def __init__(
        self, base: nn.Module, layout: ShardLayout, layouts: tuple[ShardLayout, ...], collectives: Collectives
    ):
        """`layouts`: of each layer's attention."""
        self._base = base
        self._layout = layout
        self._layouts = layouts
        self._collectives = collectives

    def split(self, name: str, style: Style) -> None:
        if _LAYER.search(name):
            self._layout = self._layouts[_layer_of(name)]
        path, _, leaf = name.rpartition(".")
        parent = self._base.get_submodule(path)
        module = getattr(parent, leaf)
        layout = self._layout
        if style is Style.EXPERTS:
            if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
                split_experts(module, name, layout, self._collectives)
        elif style is Style.EXPERT_STACKS:
            split_stacks(module, layout, self._collectives)
        elif style in (Style.QUERY_HEAD_SCALARS, Style.KEY_HEAD_SCALARS):
            heads, total = self._heads(style is Style.QUERY_HEAD_SCALARS)
            hold(parent, leaf, module, TensorSlice(0, (heads,), total))
        elif style in (Style.QUERY_HEAD_NORM, Style.KEY_HEAD_NORM):
            heads, total = self._heads(style is Style.QUERY_HEAD_NORM)
            keep_head_norms(module, name, heads, total)
        elif style in _WIDE_NORMS:
            if layout.world_size > 1:
                setattr(parent, leaf, self._wide_norm(module, name, style))
        elif style is Style.LATENT:
            setattr(parent, leaf, keep_latent(parent, layout))
        else:
            setattr(parent, leaf, self._linear(module, name, style))

    def _heads(self, queries: bool) -> tuple[ShardRange, int]:
        """(this rank's heads, heads in all)."""
        layout = self._layout
        if queries:
            return layout.q_heads, layout.total.q_heads
        return layout.kv_heads, layout.total.kv_heads

    def _wide_norm(self, norm: nn.Module, name: str, style: Style) -> nn.Module:
        width = int(norm.weight.shape[0])  # type: ignore[index]
        if style is Style.INNER_WIDE_NORM:
            inner = self._layout.dimension(width)
            return WideNorm(norm, inner, inner, self._collectives)
        queries = style is Style.QUERY_WIDE_NORM
        heads, total = self._heads(queries)
        _check_width(name, width, total * self._layout.head_dim)
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
        held_transposed(shard)
        return shard

    def _share(self, linear: nn.Linear, name: str, style: Style) -> LinearShard:
        if style is Style.WHOLE_LINEAR:
            return ColumnParallelLinear(linear, ShardRange(0, linear.out_features))
        if style not in _ROWS:
            return ColumnParallelLinear(linear, *self._spans(name, style, linear.out_features))
        span, skip = self._spans(name, style, linear.in_features)[0], 0
        if style is Style.OUTPUT:
            skip = span.start - self._layout.q_heads.scaled(self._layout.value_dim).start
        elif style is Style.ROW_OF_WHOLE:
            skip = span.start
        elif style is Style.KEY_VALUE_INPUT:
            skip = span.start - self._layout.kv_heads.scaled(self._layout.value_dim).start
        return RowParallelLinear(linear, span, self._collectives, skip)

    def _spans(self, name: str, style: Style, width: int) -> tuple[ShardRange, ...]:
        """What this rank holds of a dimension of `width`."""
        layout, total = self._layout, self._layout.total
        if style in (Style.COLUMN, Style.ROW, Style.ROW_OF_WHOLE):
            return (layout.dimension(width),)
        if style is Style.GATE_UP:
            return halves(layout.dimension(width // 2), width // 2)
        if style in _FUSED:
            _check_width(name, width, (total.q_heads + 2 * total.kv_heads) * layout.head_dim)
            return _FUSED[style](layout)
        heads, count = self._heads(style not in _OF_KEYS)
        if style in _PAIRS:
            half = layout.head_dim // (1 if style is Style.KEYS_VALUES else 2)
            _check_width(name, width, 2 * count * half)
            return halves(heads.scaled(half), width // 2)
        if style is Style.OUTPUT:
            heads = layout.output_heads
        elif style is Style.KEY_VALUE_INPUT:
            heads = layout.counted_kv_heads
        size = layout.head_dim
        if style is Style.GATED_QUERY:
            size += layout.value_dim
        elif style is Style.OUTPUT or (style is Style.KEY_VALUE and width == count * layout.value_dim):
            size = layout.value_dim
        elif style is Style.QUERY and width in (count, count * layout.value_dim):
            size = width // count  # a gate for each head, or for each value
        _check_width(name, width, count * size)
        return (heads.scaled(size),)


def _check_width(name: str, width: int, expected: int) -> None:
    if width != expected:
        raise ModelLoadError(
            f"The attention projection or norm {name} is {width} wide where the heads in config.json make "
            f"{expected}; models whose heads differ in shape are not served."
        )


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


def _check_whole(attention: nn.Module, name: str, layout: ShardLayout, plan: Plan) -> None:
    """Refuses an attention in which a parameter that no rank splits, and no line of the plan calls whole, spans
    several heads."""
    if layout.world_size == 1:
        return
    called_whole = [as_regex(key) for key, style in plan.items() if style is Style.WHOLE]
    for parameter_name, parameter in attention.named_parameters():
        path, _, leaf = parameter_name.rpartition(".")
        owner = attention.get_submodule(path)
        named = any(pattern.fullmatch(f"{name}.{path}") for pattern in called_whole)
        whole = named or leaf in _OF_ALL_HEADS or tuple(parameter.shape) in ((layout.head_dim,), (1,), ())
        if piece_of(owner, leaf) is None and not whole:
            raise ModelLoadError(
                f"The parameter {name}.{parameter_name} spans several heads and cannot be split over ranks; "
                "serve this model with --tp 1."
            )


def _check_layers(attentions: Mapping[str, nn.Module], config: Any, states: LayerStates) -> None:
    layers = sorted(getattr(attention, "layer_idx", -1) for attention in attentions.values())
    kind = state_kind(config.model_type)
    by_itself = kind is not None and kind.mixer
    expected = [
        layer for layer, state in enumerate(states) if not by_itself and (state.pages or state.reads is not None)
    ]
    if layers != expected:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} has {len(attentions)} attention layers that can be served "
            f"where its configuration makes {len(expected)} of {config.num_hidden_layers} layers; choose a model of "
            "another architecture."
        )


# Where several modules of a layer keep state, of each by its name.
_SplitOf = Callable[[Any, ShardLayout], MixerSplit | Mapping[str, MixerSplit]]


class _Mixer(NamedTuple):
    """A module that keeps recurrent state."""

    module: nn.Module
    part: str  # what its layer calls it
    layer: int
    place: int  # of its layer among those with a slot
    prefix: str  # what the names of its tensors begin with


def _mixers(base: nn.Module, config: Any, states: LayerStates) -> dict[str, _Mixer]:
    """The modules that keep recurrent state, by their names, in the order of their layers."""
    kept = [layer for layer, state in enumerate(states) if state.slot]
    if not kept:
        return {}
    modules, layers = dict(base.named_modules()), "blocks" if hasattr(base, "blocks") else "layers"
    found = {}
    for place, layer in enumerate(kept):
        tensors = [tensor.name for tensor in states[layer].slot]
        for part in family_of(config.model_type).recurrent_modules:
            if (name := f"{layers}.{layer}.{part}") in modules:
                own = any(tensor.startswith(f"{part}.") for tensor in tensors)
                found[name] = _Mixer(modules[name], part, layer, place, f"{part}." if own else "")
    return found


def _split_mixers(
    model: Any,
    mixers: Mapping[str, _Mixer],
    config: Any,
    layout: ShardLayout,
    states: LayerStates,
    collectives: Collectives,
) -> None:
    """Splits the modules that keep recurrent state, and has them find it in the store's slots."""
    if not mixers:
        return
    kind = state_kind(config.model_type)
    assert kind is not None, "its layers have slots"
    split_of: _SplitOf = resolve_name(kind.splits[family_of(config.model_type).mixer])
    splits, current = split_of(config, layout), CurrentStep(model)
    for mixer in mixers.values():
        split = splits if isinstance(splits, MixerSplit) else splits[mixer.part]
        split_mixer(mixer.module, split, collectives)
        if kind.mixer:
            resolve_name(kind.mixer)(mixer.module, _place(config, states, mixer.layer, layout))
        else:
            keep_in_slots(mixer.module, mixer.place, current, mixer.prefix)
    if hasattr(model.base_model, "layers_are_rescaled"):
        model.base_model.layers_are_rescaled = True  # RWKV's modules scale what they make, not their weights


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
        model.set_submodule(_name_of(model, embedding), split)
        if tied:
            head.weight = split.weight
    model.set_submodule(head_name, head)
    for name, other in [*model.named_modules()]:
        of_layer = type(other).__name__.endswith(_SCALED_EMBEDDING) or name.endswith(_NGRAM_EMBEDDING)
        if isinstance(other, nn.Embedding) and of_layer:
            rows = layout.dimension(other.num_embeddings)
            model.set_submodule(name, VocabParallelEmbedding(other, rows, collectives))


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]

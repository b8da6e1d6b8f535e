"""Splits a transformers model over the ranks of a ring, after the model's own parallel plan.

The plan (`base_model_tp_plan`) is read as data: module name patterns and the style of each.
transformers' own tensor-parallel runtime is not used, because it needs heads that divide evenly.
A style that is not known here is an error: a layer that is silently replicated computes nonsense
as soon as its neighbour is split.
"""

import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

from torch import nn

from services.executor.model.collectives import Collectives
from services.executor.model.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from services.executor.model.sharding import ShardLayout, Span
from shared.errors import ModelLoadError


class _Style(Enum):
    COLUMN = auto()
    ROW = auto()
    WHOLE = auto()
    """Each rank computes all of it."""
    WHOLE_INSIDE = auto()
    """Split weights, whole activations: the code around it needs all of them, so only one rank can run it."""
    EMBEDDING = auto()


_STYLES: Mapping[str, _Style] = {
    "colwise": _Style.COLUMN,
    "rowwise": _Style.ROW,
    "colwise_gather_output": _Style.WHOLE_INSIDE,
    "colwise_rep": _Style.WHOLE_INSIDE,
    "rowwise_split_input": _Style.WHOLE_INSIDE,
    "rowwise_rep": _Style.WHOLE_INSIDE,
    "replicated": _Style.WHOLE,
    "replicate": _Style.WHOLE,
    "replicated_with_grad_allreduce": _Style.WHOLE,
    "embedding_rowwise": _Style.EMBEDDING,
}

_HEAD_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})

_QUERY = frozenset({"q_proj"})
_KEY_VALUE = frozenset({"k_proj", "v_proj"})
_OUTPUT = frozenset({"o_proj", "out_proj", "dense"})
_HEAD_COUNT_ATTRIBUTES = {
    "num_heads": "q_heads",
    "num_attention_heads": "q_heads",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
}


def apply_plan(model: nn.Module, config: Any, layout: ShardLayout, collectives: Collectives) -> None:
    """Replaces `model`'s linear and embedding layers by this rank's share of them, in place.

    `model` is a transformers causal language model with its parameters on the meta device; `config`
    its text configuration. Raises `ModelLoadError` where the plan cannot be followed.
    """
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} has no parallel plan in transformers "
            "and is not served; choose a model of another architecture."
        )
    tied = _tied_head(model)
    base: nn.Module = model.base_model  # type: ignore[assignment]
    attentions: dict[str, nn.Module] = {}
    for name, style in _planned(base, plan):
        parent, leaf = _parent(base, name)
        linear = getattr(parent, leaf)
        if _is_attention_projection(parent, leaf):
            attentions[name.rpartition(".")[0]] = parent
        if style is _Style.WHOLE_INSIDE:
            _refuse_split(config, name, layout)
        elif style is _Style.COLUMN:
            span = _column_span(linear, name, parent, layout)
            setattr(parent, leaf, ColumnParallelLinear(linear, span))
        elif style is _Style.ROW:
            span = _row_span(linear, name, parent, layout)
            setattr(parent, leaf, RowParallelLinear(linear, span, collectives))
    for name, attention in attentions.items():
        _localise_attention(attention, name, layout)
    _check_layers(attentions, config)
    _split_vocabulary(model, layout, collectives, tied)


def _planned(base: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, _Style]]:
    """(module name, style) for each module that the plan names."""
    patterns = [(re.compile(_as_regex(key)), style) for key, style in plan.items()]
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    modules = {name for name, _ in base.named_modules()}
    for name in names:
        style_name = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style_name is None:
            continue
        style = _STYLES.get(style_name)
        if style is None:
            raise ModelLoadError(
                f"The model's parallel plan names the style {style_name!r} for {name}, which is not served; "
                "choose a dense model (mixtures of experts and fused projections are not served yet)."
            )
        if name in modules:
            yield name, style


def _as_regex(key: str) -> str:
    return re.escape(key).replace(r"\*", r"[^.]+")


def _parent(base: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return base.get_submodule(path), leaf


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "head_dim", None), int)


def _is_attention_projection(parent: nn.Module, leaf: str) -> bool:
    return _is_attention(parent) and leaf.endswith(("_proj", "dense"))


def _column_span(linear: object, name: str, parent: nn.Module, layout: ShardLayout) -> Span:
    width = _linear(linear, name).out_features
    leaf = name.rpartition(".")[2]
    if not _is_attention(parent):
        return layout.dimension(width)
    if leaf in _QUERY:
        return _head_span(name, width, layout, layout.q_heads, layout.total.q_heads)
    if leaf in _KEY_VALUE:
        return _head_span(name, width, layout, layout.kv_heads, layout.total.kv_heads)
    raise _unknown_projection(name)


def _row_span(linear: object, name: str, parent: nn.Module, layout: ShardLayout) -> Span:
    width = _linear(linear, name).in_features
    leaf = name.rpartition(".")[2]
    if not _is_attention(parent):
        return layout.dimension(width)
    if leaf in _OUTPUT:
        return _head_span(name, width, layout, layout.q_heads, layout.total.q_heads)
    raise _unknown_projection(name)


def _head_span(name: str, width: int, layout: ShardLayout, heads: Span, total: int) -> Span:
    if width != total * layout.head_dim:
        raise ModelLoadError(
            f"The attention projection {name} is {width} wide where {total} heads of {layout.head_dim} "
            "need another width; models whose heads differ in shape are not served."
        )
    return heads.scaled(layout.head_dim)


def _unknown_projection(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"The attention projection {name} is none of q, k, v and output, so it cannot be split by heads; "
        "choose a model with separate projections."
    )


def _linear(module: object, name: str) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise ModelLoadError(
            f"The parallel plan splits {name}, which is a {type(module).__name__} and not a plain linear layer; "
            "choose a model of another architecture or an unquantised checkpoint."
        )
    return module


def _refuse_split(config: Any, name: str, layout: ShardLayout) -> None:
    if layout.world_size > 1:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} needs the whole output of {name} on every rank "
            "(fused projections or norms over all heads) and cannot be split; serve it with --tp 1."
        )


def _localise_attention(attention: nn.Module, name: str, layout: ShardLayout) -> None:
    """Makes the module's own head counts local, and refuses what is left in it that spans all heads."""
    for attribute, heads in _HEAD_COUNT_ATTRIBUTES.items():
        if getattr(attention, attribute, None) == getattr(layout.total, heads):
            setattr(attention, attribute, getattr(layout, heads).size)
    attention.num_key_value_groups = layout.q_per_kv  # type: ignore[assignment]
    if layout.world_size == 1:
        return
    for parameter_name, parameter in attention.named_parameters():
        owner = attention.get_submodule(parameter_name.rpartition(".")[0])
        split_here = isinstance(owner, ColumnParallelLinear | RowParallelLinear)
        if not split_here and tuple(parameter.shape) != (layout.head_dim,):
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
    head_name = _name_of(model, model.get_output_embeddings())
    style = str((getattr(model, "_tp_plan", None) or {}).get(head_name, "colwise_gather_output"))
    if style not in _HEAD_STYLES:
        raise ModelLoadError(
            f"The model's parallel plan names the style {style!r} for its output layer {head_name}, "
            "which is not served; choose a model of another architecture."
        )
    head = VocabParallelHead(
        _linear(model.get_output_embeddings(), head_name), layout.rank, layout.world_size
    )
    embedding = model.get_input_embeddings()
    # An embedding that does more than look up (a scaled one) keeps all rows on every rank.
    if type(embedding) is nn.Embedding:
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

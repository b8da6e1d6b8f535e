"""Which models the kernels can run, and what they need to know of them.

A model is lowered when its layers have the shape that `decoder.h` draws. Its type must be listed here:
structure alone does not tell what a forward pass does between its modules. Everything else is read from
the modules, so that one function serves all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.model.layers import LinearShard, VocabParallelEmbedding
from services.executor.model.sharding import split_dimension
from services.executor.native.packed import GATE_RUN, Piece, alternating, one_after_another

_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
_BY_LENGTH = frozenset({"dynamic", "longrope"})
_MOST_GROUP = 48
"""Query heads of a KV head that a tile of attention has room for (`attention.h`)."""
_HEAD_DIMS = frozenset(range(32, 257, 32))


@dataclass(frozen=True)
class Family:
    """What sets a type of model apart, beyond what its modules show."""

    norm_offset: float = 0.0
    """Added to the weights of norms."""
    post_norms: bool = False
    """Norms behind attention and feed-forward too, under Gemma's names."""
    scaled: bool = False
    """Granite's multipliers."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
    "seed_oss": Family(),
    "phi3": Family(),
    "granite": Family(scaled=True),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(norm_offset=1.0, post_norms=True),
    "gemma3_text": Family(norm_offset=1.0, post_norms=True),
}


class CannotLower(Exception):
    """The model has another shape; says which."""


@dataclass
class LoweredLayer:
    """One layer. Norm weights are float32, on the CPU; pieces are yet to be packed."""

    norms: dict[str, Tensor]
    """By the field of the kernels' structure."""
    attention: nn.Module
    feed_forward: nn.Module
    rotary: int
    window: int


@dataclass
class Lowered:
    """All of a model but its packed weights."""

    layers: list[LoweredLayer]
    final_norm: Tensor
    embedding: nn.Module
    head: LinearShard
    frequencies: list[tuple[Tensor, float]]
    """(radians per position float32 [rotary dim / 2], scale of cosines and sines)"""
    scalars: dict[str, float]
    """By the field of the kernels' structure."""
    activation: int


def lower(model: Any, dtype: torch.dtype, world_size: int) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed.

    Raises `CannotLower` with the reason, on all `world_size` ranks or on none.
    """
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise CannotLower(f"models of type {config.model_type} run through PyTorch")
    if dtype is not torch.bfloat16:
        raise CannotLower("only bf16 is computed by the native kernels")
    activation = _ACTIVATIONS.get(getattr(config, "hidden_activation", None) or config.hidden_act)
    if activation is None:
        raise CannotLower(f"the activation {config.hidden_act} is not known to the native kernels")
    _check_widths(config, world_size)
    base = model.model
    frequencies = _Frequencies(base.rotary_emb)
    layers = [_layer(layer, config, family, frequencies) for layer in base.layers]
    head = model.get_output_embeddings()
    if config.num_attention_heads > _MOST_GROUP * config.num_key_value_heads:
        raise CannotLower(f"more than {_MOST_GROUP} query heads share a KV head")
    if layers[0].attention.head_dim not in _HEAD_DIMS:
        raise CannotLower(f"heads of {layers[0].attention.head_dim} values do not fit the native kernels")
    return Lowered(
        layers=layers,
        final_norm=_norm_weight(base.norm, family),
        embedding=base.embed_tokens,
        head=head,
        frequencies=frequencies.sets,
        scalars=_scalars(model, config, family, layers[0].attention),
        activation=activation,
    )


def qkv_pieces(attention: Any, q_rows: int, kv_rows: int) -> list[Piece]:
    """Queries, keys and values of a layer; `q_rows` and `kv_rows` are this rank's."""
    if hasattr(attention, "qkv_proj"):
        weight, bias = _weights(attention.qkv_proj)
        sizes = [q_rows, kv_rows, kv_rows]
        biases = [None] * 3 if bias is None else torch.split(bias, sizes)
        return one_after_another(zip(torch.split(weight, sizes), biases, strict=True))
    return one_after_another(_weights(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))


def gate_up_pieces(feed_forward: Any) -> list[Piece]:
    """Gate and up projections of a layer, alternating."""
    if hasattr(feed_forward, "gate_up_proj"):
        gate, up = feed_forward.gate_up_proj.weight.chunk(2)
        return alternating((gate, None), (up, None))
    return alternating(_weights(feed_forward.gate_proj), _weights(feed_forward.up_proj))


def linears_of(layer: LoweredLayer) -> Iterator[LinearShard]:
    """The linears of a layer, whose plain weights go once they are packed."""
    for part in (layer.attention, layer.feed_forward):
        yield from (module for module in part.modules() if isinstance(module, LinearShard))


def _layer(layer: Any, config: Any, family: Family, frequencies: "_Frequencies") -> LoweredLayer:
    attention, feed_forward = layer.self_attn, layer.mlp
    _check_linears(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), "o_proj")
    _check_linears(feed_forward, ("gate_up_proj",), ("gate_proj", "up_proj"), "down_proj")
    norms = {"attention_norm": layer.input_layernorm}
    if family.post_norms:
        norms["after_attention_norm"] = layer.post_attention_layernorm
        norms["feed_forward_norm"] = layer.pre_feedforward_layernorm
        norms["after_feed_forward_norm"] = layer.post_feedforward_layernorm
    else:
        norms["feed_forward_norm"] = layer.post_attention_layernorm
    if hasattr(attention, "q_norm"):
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    return LoweredLayer(
        norms={name: _norm_weight(norm, family) for name, norm in norms.items()},
        attention=attention,
        feed_forward=feed_forward,
        rotary=frequencies.of(attention, config),
        window=_window(attention, config),
    )


def _check_widths(config: Any, world_size: int) -> None:
    inner = split_dimension(config.intermediate_size, world_size)
    if config.hidden_size % 2 or any(span.size % GATE_RUN for span in inner):
        raise CannotLower(
            f"a hidden size of {config.hidden_size} with an inner width of {config.intermediate_size} does not "
            "fit the native kernels"
        )


def _check_linears(part: Any, fused: tuple[str, ...], single: tuple[str, ...], last: str) -> None:
    names = (*(fused if hasattr(part, fused[0]) else single), last)
    if not all(isinstance(getattr(part, name, None), LinearShard) for name in names):
        raise CannotLower(f"a {type(part).__name__} is built of other layers")


def _weights(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _norm_weight(norm: Any, family: Family) -> Tensor:
    weight: Tensor = norm.weight.detach().float() + family.norm_offset
    return weight.contiguous()


def _window(attention: Any, config: Any) -> int:
    """As the model hands it to attention: some keep it in the layer, some in the configuration."""
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return int(window or 0)


class _Frequencies:
    """The rotary frequencies of a model: one set, or one per type of layer."""

    def __init__(self, rotary: Any) -> None:
        names = [
            name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name
        ]
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
        for kind in kinds.values():
            if kind in _BY_LENGTH:
                raise CannotLower(f"rotary embeddings of type {kind} follow the length of the text")
        if not 1 <= len(names) <= 2:
            raise CannotLower(f"the model has {len(names)} sets of rotary frequencies")
        self._names = names
        self.sets = []
        for name in names:
            scaling = getattr(rotary, name.replace("inv_freq", "attention_scaling"), 1.0)
            self.sets.append((getattr(rotary, name).detach().float().contiguous(), float(scaling)))

    def of(self, attention: Any, config: Any) -> int:
        """Index of the set that a layer turns by; -1 where it turns nothing."""
        if not getattr(attention, "use_rope", True):
            return -1
        if len(self._names) == 1:
            return 0
        return self._names.index(f"{config.layer_types[attention.layer_idx]}_inv_freq")


def _scalars(model: Any, config: Any, family: Family, attention: Any) -> dict[str, float]:
    scale = getattr(model.model.embed_tokens, "embed_scale", None)
    scalars = {
        "eps": float(config.rms_norm_eps),
        "attention_scale": float(attention.scaling),
        "attention_cap": float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        # Rounded as the model rounds it.
        "embedding_scale": 1.0 if scale is None else float(scale.to(torch.bfloat16)),
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "logit_cap": float(getattr(config, "final_logit_softcapping", None) or 0.0),
    }
    if family.scaled:
        scalars["embedding_scale"] = float(config.embedding_multiplier)
        scalars["residual_scale"] = float(config.residual_multiplier)
        scalars["logit_scale"] = 1.0 / float(config.logits_scaling)
    return scalars


def vocabulary(lowered: Lowered) -> tuple[Tensor, int, bool]:
    """(embedding weight [rows, hidden], token of its first row, whether the ranks hold different rows)"""
    embedding: Any = lowered.embedding
    if isinstance(embedding, VocabParallelEmbedding):
        return embedding.weight, embedding.span.start, True
    return embedding.weight, 0, False

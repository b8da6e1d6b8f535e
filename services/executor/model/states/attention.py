"""Keys and values of every token, of which layers read less, or share what they read, or keep more."""

from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, attention
from services.executor.core.sharding import ShardLayout
from services.executor.model.states.base import MODEL, StateKind, attending, layer_layouts

KEY_BIAS_WIDTH = 8  # values stored after a key: its bias, then zeros


def _chunked(config: Any, layout: ShardLayout) -> LayerStates:
    """Llama 4's: three layers that attend within chunks for each that sees everything."""
    kinds = ["chunked" if kind == "chunked_attention" else "full" for kind in config.layer_types]
    return tuple(attention(layout.kv_heads.size, layout.head_dim, kind) for kind in kinds)


def _shared_keys(config: Any, layout: ShardLayout) -> LayerStates:
    """Gemma 3n's and 4's: the last layers read the pages of the last layer before them that is of their type."""
    types: list[str] = config.layer_types
    own = len(types) - config.num_kv_shared_layers
    source = {kind: layer for layer, kind in enumerate(types[:own])}
    layouts = layer_layouts(config, layout)
    return tuple(
        attending(layouts[layer], kind) if layer < own else LayerState("shared", reads=source[kind])
        for layer, kind in enumerate(types)
    )


def _with_bias(config: Any, layout: ShardLayout) -> LayerStates:
    """Doge: a bias of its own for each key, stored after it."""
    layer = attention(layout.kv_heads.size, layout.head_dim + KEY_BIAS_WIDTH)
    return (layer,) * int(config.num_hidden_layers)


CHUNKED = StateKind(
    "chunked",
    _chunked,
    shown={"chunked": "chunk"},
    layer_types=("chunked_attention",),
    attention=f"{MODEL}.parallel.module_patches:attend_within_chunks",
)
SHARED_KEYS = StateKind("shared_keys", _shared_keys, shown={"shared": r"(^|, )shared keys"})
BIASED_KEYS = StateKind("biased_keys", _with_bias)

"""The windows of convolutions over a few tokens."""

from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, Pages, StateTensor
from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.states.base import MIXERS, StateKind, between_attention
from shared.errors import ConfigurationError


def _short_convolution(config: Any, layout: ShardLayout) -> LayerStates:
    """LFM's: layers that are a convolution over a few tokens, between two gates, and some with attention."""
    channels = layout.dimension(config.hidden_size).size
    window = StateTensor("conv", (channels, config.conv_L_cache - 1), fp32=False)
    return between_attention(config, layout, LayerState("recurrent", slot=(window,)))


def _convolved_keys(config: Any, layout: ShardLayout) -> LayerStates:
    """ZAYA's: queries and keys after two convolutions, and half of the values from the token before. All heads of a
    group are on one rank, because a key takes the mean of its queries."""
    if layout.world_size > layout.total.kv_heads:
        raise ConfigurationError(
            f"The model has {layout.total.kv_heads} KV heads, whose queries cannot be split over "
            f"{layout.world_size} ranks; use --tp {layout.total.kv_heads} or less."
        )
    heads, size = layout.q_heads.size + layout.kv_heads.size, layout.head_dim
    window = (config.cca_time0 - 1) + (config.cca_time1 - 1)
    slot = (
        StateTensor("conv", (heads * size, window), fp32=False),
        StateTensor("recurrent", (delayed_values(layout).size,), fp32=False),
    )
    keys = Pages(2, layout.kv_heads.size, size)
    return (LayerState("hybrid", (keys,), slot),) * int(config.num_hidden_layers)


def delayed_values(layout: ShardLayout) -> ShardRange:
    """ZAYA: of the values that are from the token before those of this rank. They are the second half of all heads'."""
    half = layout.total.kv_heads * layout.head_dim // 2
    values = layout.kv_heads.scaled(layout.head_dim)
    return ShardRange(max(values.start - half, 0), max(values.stop - half, 0))


SHORT_CONVOLUTION = StateKind(
    "short_convolution",
    _short_convolution,
    shown={"recurrent": "convolution"},
    layer_types=("conv",),
    splits={"": f"{MIXERS}.convolutions:short_convolution"},
)
CONVOLVED_KEYS = StateKind(
    "convolved_keys",
    _convolved_keys,
    shown={"recurrent": "convolution"},
    layer_types=("hybrid", "hybrid_sliding"),
    splits={"": f"{MIXERS}.convolutions:convolved_keys"},
)

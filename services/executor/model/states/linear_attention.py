"""Linear attention: sums of values by keys, a matrix for each head or a number for each channel."""

from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, StateTensor
from services.executor.core.sharding import ShardLayout
from services.executor.model.states.base import LINEAR, MIXERS, StateKind, between_attention, linear_heads


def _lightning(config: Any, layout: ShardLayout) -> LayerStates:
    """MiniMax's: a matrix for each head, in layers with lightning attention."""
    heads = linear_heads(config, layout)
    matrix = StateTensor("recurrent", (heads.q_heads.size, heads.head_dim, heads.head_dim))
    return between_attention(config, layout, LayerState("recurrent", slot=(matrix,)))


def _rwkv(config: Any, layout: ShardLayout) -> LayerStates:
    """RWKV's: the token before, of attention and of feed-forward, and sums of values and weights."""
    last = (config.hidden_size,)
    width = layout.dimension(config.attention_hidden_size).size
    slot = (
        StateTensor("attention.last", last, fp32=False),
        StateTensor("attention.sums", (3, width)),
        StateTensor("feed_forward.last", last, fp32=False),
    )
    return (LayerState("recurrent", slot=slot),) * int(config.num_hidden_layers)


def memory_widths(config: Any) -> tuple[int, int]:
    """xLSTM: of a head's keys and of its values."""
    return (
        int(config.hidden_size * config.qk_dim_factor) // config.num_heads,
        int(config.hidden_size * config.v_dim_factor) // config.num_heads,
    )


def _matrix_memory(config: Any, layout: ShardLayout) -> LayerStates:
    """xLSTM's: a matrix for each head, with the sum of its weights behind the values, and the exponent of both."""
    heads, (key_dim, value_dim) = layout.q_heads.size, memory_widths(config)
    slot = (StateTensor("memory", (heads, key_dim, value_dim + 1)), StateTensor("most", (heads,)))
    return (LayerState("recurrent", slot=slot),) * int(config.num_hidden_layers)


LIGHTNING = StateKind(
    "lightning",
    _lightning,
    shown={"recurrent": "lightning|linear attention"},
    layer_types=LINEAR,
    splits={"": f"{MIXERS}.lightning:lightning"},
)
RWKV = StateKind("rwkv", _rwkv, shown={"recurrent": "RWKV"}, splits={"": f"{MIXERS}.rwkv:rwkv"})
MATRIX_MEMORY = StateKind(
    "matrix_memory", _matrix_memory, shown={"recurrent": "LSTM"}, splits={"": f"{MIXERS}.matrix_memory:matrix_memory"}
)

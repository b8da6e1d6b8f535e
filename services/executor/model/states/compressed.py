"""Compressed attention (DeepSeek V4): the last tokens' lines in a slot, and a line of every few tokens in blocks."""

from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, Pages, StateTensor
from services.executor.core.sharding import ShardLayout
from services.executor.model.states.base import MODEL, StateKind


def _compressed(config: Any, layout: ShardLayout) -> LayerStates:
    """The lines of the last tokens, and a line of every few tokens in layers that see further."""
    window = StateTensor("window", (config.sliding_window, config.head_dim), fp32=False)

    def given(name: str, tokens: int, widths: int) -> StateTensor:
        """What lines are made of: values and gates of the last tokens."""
        return StateTensor(name, (tokens, 2 * widths), fp32=False)

    heavy, sparse = (
        config.compress_rates[kind] for kind in ("heavily_compressed_attention", "compressed_sparse_attention")
    )
    line, key = config.head_dim, config.index_head_dim
    kinds = {
        "sliding_attention": LayerState("compressed", slot=(window,)),
        "heavily_compressed_attention": LayerState(
            "compressed", (Pages(1, 1, line, heavy),), (window, given("lines", heavy, line))
        ),
        "compressed_sparse_attention": LayerState(
            "compressed",
            (Pages(1, 1, line, sparse), Pages(1, 1, key, sparse)),
            # A token gives to two lines.
            (window, given("lines", 2 * sparse, 2 * line), given("keys", 2 * sparse, 2 * key)),
        ),
    }
    return tuple(kinds[kind] for kind in config.layer_types)


COMPRESSED = StateKind(
    "compressed",
    _compressed,
    shown={"compressed": "compressed"},
    layer_types=("compressed_sparse_attention", "heavily_compressed_attention"),
    mixer=f"{MODEL}.parallel.compressed_attention:attend_compressed",
    splits={"": f"{MODEL}.parallel.compressed_attention:compressed"},
)

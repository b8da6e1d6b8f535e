"""One line for all heads in place of keys and values: latents (MLA) and what an indexer keeps beside them, and lines of
several tokens behind a window of the last (DeepSeek V4)."""

from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, Pages, StateTensor
from services.executor.core.sharding import ShardLayout
from services.executor.model.states.base import MODEL, StateKind, attending, latent_line


def _latent(config: Any, layout: ShardLayout) -> LayerStates:
    return (latent_line(config),) * int(config.num_hidden_layers)


def _indexed(config: Any, layout: ShardLayout) -> LayerStates:
    """Latent everywhere; an indexer's keys beside it in layers that choose tokens themselves."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    own = getattr(config, "indexer_types", None)
    states = []
    for index, kind in enumerate(config.layer_types):
        line = latent_line(config if layers is None else layers[index])
        if kind != "indexed_attention":
            states.append(line)
        elif own is not None and own[index] != "full":
            states.append(LayerState("indexed", line.pages))
        else:
            states.append(LayerState("indexed", (*line.pages, Pages(1, 1, config.index_head_dim))))
    return tuple(states)


def _chosen_blocks(config: Any, layout: ShardLayout) -> LayerStates:
    """MiniMax M3's: keys and values everywhere, an indexer's keys beside them where it chooses blocks."""
    own = attending(layout)
    indexed = LayerState("indexed", (*own.pages, Pages(1, 1, config.index_head_dim)))
    return tuple(own if kind == "full_attention" else indexed for kind in config.layer_types)


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


LATENT = StateKind("latent", _latent, shown={"latent": "latent"}, has_latents=True)
INDEXED = StateKind(
    "indexed",
    _indexed,
    shown={"latent": "latent", "indexed": "index"},
    layer_types=("indexed_attention",),
    has_latents=True,
    attention=f"{MODEL}.indexing:choose_tokens",
)
CHOSEN_BLOCKS = StateKind(
    "chosen_blocks",
    _chosen_blocks,
    shown={"indexed": "index"},
    layer_types=("minimax_m3_sparse",),
    attention=f"{MODEL}.chosen_blocks:choose_blocks",
)
COMPRESSED = StateKind(
    "compressed",
    _compressed,
    shown={"compressed": "compressed"},
    layer_types=("compressed_sparse_attention", "heavily_compressed_attention"),
    mixer=f"{MODEL}.parallel.compressed_attention:attend_compressed",
    splits={"": f"{MODEL}.parallel.compressed_attention:compressed"},
)

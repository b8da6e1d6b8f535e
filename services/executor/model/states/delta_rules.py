"""Delta rules: the window of a convolution, and a matrix for each head; split by heads."""

from typing import Any

import msgspec

from services.executor.core.layer_state import LayerState, LayerStates, Pages, StateTensor
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.model.states.base import (
    LINEAR,
    MIXERS,
    MODEL,
    StateKind,
    attending,
    between_attention,
    latent_line,
    linear_heads,
)


def delta_heads(config: Any, layout: ShardLayout) -> ShardLayout:
    """How the heads of gated delta rules are split: value heads in groups over key heads, as queries are over keys."""
    heads = HeadCounts(config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim)
    return ShardLayout.of(heads, layout.world_size, layout.rank)


def _gated_delta(config: Any, layout: ShardLayout) -> LayerStates:
    """Qwen 3.5's and its kin: three layers with a gated delta rule for each with attention."""
    heads = delta_heads(config, layout)
    values, keys = heads.q_heads.size, heads.kv_heads.size
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * keys * key_dim + values * value_dim
    recurrent = LayerState(
        "recurrent",
        slot=(
            StateTensor("conv", (channels, config.linear_conv_kernel_dim - 1), fp32=False),
            StateTensor("recurrent", (values, key_dim, value_dim)),
        ),
    )
    return between_attention(config, layout, recurrent)


def _gated_delta_beside_ngrams(config: Any, layout: ShardLayout) -> LayerStates:
    """Qwen 4's: three layers with a gated delta rule for each with attention to chosen blocks. Some have embeddings of
    a token with those before it: the window of a convolution whose taps are apart, and the tokens before."""
    reach = (config.ple_conv_kernel_size - 1) * config.ngram_size
    ngrams = (
        StateTensor("ple.conv.1", (config.hc_count * config.hidden_size, reach), fp32=False),
        StateTensor("ple.conv.2", (config.ngram_size - 1,)),
    )
    tokens, width = config.indexer_compress_ratio, config.indexer_head_dim
    indexed = LayerState(
        "indexed",
        (*attending(layout).pages, Pages(1, 1, width, tokens)),
        (StateTensor("keys", (tokens, width), fp32=False),),
    )
    states = []
    for layer, state in enumerate(_gated_delta(config, layout)):
        if config.layer_types[layer] == "indexed_attention":
            states.append(indexed)
            continue
        own = [msgspec.structs.replace(part, name=f"linear_attn.{part.name}") for part in state.slot]
        slot = (*own, *ngrams) if layer + 1 in config.ple_layer_ids else tuple(own)
        states.append(msgspec.structs.replace(state, slot=slot))
    return tuple(states)


def _kimi_delta(config: Any, layout: ShardLayout) -> LayerStates:
    """Kimi's: three layers with its delta attention for each with latent attention."""
    heads = linear_heads(config, layout)
    count, size = heads.q_heads.size, heads.head_dim
    window = StateTensor("conv", (3 * count * size, config.linear_conv_kernel_dim - 1), fp32=False)
    state = LayerState("recurrent", slot=(window, StateTensor("recurrent", (count, size, size))))
    return tuple(state if kind == "linear_attention" else latent_line(config) for kind in config.layer_types)


_SPLITS = f"{MIXERS}.delta_rules"

GATED_DELTA = StateKind(
    "gated_delta",
    _gated_delta,
    shown={"recurrent": "delta"},
    layer_types=LINEAR,
    splits={
        "": f"{_SPLITS}:gated_delta",
        "grouped_gated_delta": f"{_SPLITS}:grouped_gated_delta",
        "separate_gated_delta": f"{_SPLITS}:separate_gated_delta",
    },
    lowered=dict.fromkeys(
        ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        f"{MODEL}.lowered_recurrent:gated_delta",
    ),
)
GATED_DELTA_BESIDE_NGRAMS = StateKind(
    "gated_delta_beside_ngrams",
    _gated_delta_beside_ngrams,
    shown={"recurrent": "delta", "indexed": "index"},
    layer_types=("indexed_attention", *LINEAR),
    attention=f"{MODEL}.parallel.pooled_blocks:choose_pooled_blocks",
    splits={"": f"{_SPLITS}:delta_beside_ngrams"},
)
KIMI_DELTA = StateKind(
    "kimi_delta",
    _kimi_delta,
    shown={"recurrent": "delta", "latent": "latent"},
    layer_types=LINEAR,
    has_latents=True,
    splits={"": f"{_SPLITS}:kimi_delta", "factored_kimi_delta": f"{_SPLITS}:factored_kimi_delta"},
)

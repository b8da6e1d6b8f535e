"""What layers keep, from the configuration alone (`core/layer_state.py`).

A family declares one of these kinds of states, most keys and values in every layer. Each kind has a function that says
for one rank what its layers keep: sizes follow the rank's heads, as its weights do (`parallel/plans.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from services.executor.core.layer_state import Kind, LayerState, LayerStates, Pages, StateTensor, attention
from services.executor.core.sharding import HeadCounts, ShardLayout, ShardRange
from services.executor.families.family import States
from services.executor.families.registry import family_of
from shared.errors import ConfigurationError, ModelLoadError, reason_of

Rule = Callable[[Any, ShardLayout], LayerStates]


def layer_states(config: Any, layout: ShardLayout) -> LayerStates:
    """Of the model of this transformers text configuration, on the rank of `layout`. Raises `ModelLoadError` where it
    does not say so."""
    rule = _RULES[family_of(config.model_type).states]
    try:
        return rule(config, layout)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"The model's config.json does not say what its layers keep ({reason_of(error)}); it is damaged or of "
            "another model, fetch it again."
        ) from error


def layer_layouts(config: Any, layout: ShardLayout) -> tuple[ShardLayout, ...]:
    """How the attention heads of each layer are split: as `layout` has it, unless layers have heads of their own."""
    if by_layer := family_of(config.model_type).heads_by_layer:
        heads = _HEADS[by_layer](config)
    elif getattr(config, "is_heterogeneous", False):
        heads = tuple(HeadCounts.from_config(layer) for layer in config.per_layer_config)
    else:
        return (layout,) * int(config.num_hidden_layers)
    return tuple(ShardLayout.of(counts, layout.world_size, layout.rank) for counts in heads)


def _attention_everywhere(config: Any, layout: ShardLayout) -> LayerStates:
    layouts = layer_layouts(config, layout)
    types = getattr(config, "layer_types", None) or ("full_attention",) * len(layouts)
    return tuple(_attention(own, kind) for own, kind in zip(layouts, types, strict=True))


def _chunked(config: Any, layout: ShardLayout) -> LayerStates:
    """Llama 4's: three layers that attend within chunks for each that sees everything."""
    kinds: list[Any] = ["chunked" if kind == "chunked_attention" else "full" for kind in config.layer_types]
    return tuple(attention(layout.kv_heads.size, layout.head_dim, kind) for kind in kinds)


def _shared_keys(config: Any, layout: ShardLayout) -> LayerStates:
    """Gemma 3n's and 4's: the last layers read the pages of the last layer before them that is of their type."""
    types: list[str] = config.layer_types
    own = len(types) - config.num_kv_shared_layers
    source = {kind: layer for layer, kind in enumerate(types[:own])}
    layouts = layer_layouts(config, layout)
    return tuple(
        _attention(layouts[layer], kind) if layer < own else LayerState("shared", reads=source[kind])
        for layer, kind in enumerate(types)
    )


def _attention(layout: ShardLayout, layer_type: str = "full_attention") -> LayerState:
    kind: Kind = "sliding" if layer_type == "sliding_attention" else "full"
    return attention(layout.kv_heads.size, max(layout.head_dim, layout.value_dim), kind)


def _laguna_heads(config: Any) -> Iterable[HeadCounts]:
    """Laguna: other query heads in other layers."""
    for heads in config.num_attention_heads_per_layer:
        yield HeadCounts(heads, config.num_key_value_heads, config.head_dim)


def _mimo_heads(config: Any) -> Iterable[HeadCounts]:
    """MiMo V2 Flash: twice the KV heads where a layer sees a window, and narrower values."""
    for kind in config.layer_types:
        kv_heads = config.num_key_value_heads * (2 if kind == "sliding_attention" else 1)
        yield HeadCounts(config.num_attention_heads, kv_heads, config.head_dim, config.v_head_dim)


_HEADS: Mapping[str, Callable[[Any], Iterable[HeadCounts]]] = MappingProxyType(
    {
        "listed": _laguna_heads,
        "wider_windows": _mimo_heads,
    }
)
"""The heads of each layer, by `heads_by_layer` of a family."""


def latent(config: Any) -> LayerState:
    """Of every token the latent and the rotated part of its key, one line for all heads: whole on each rank."""
    return LayerState("latent", (Pages(1, 1, config.kv_lora_rank + config.qk_rope_head_dim),))


def _indexed(config: Any, layout: ShardLayout) -> LayerStates:
    """Latent everywhere; an indexer's keys beside it in layers that choose tokens themselves."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    own = getattr(config, "indexer_types", None)
    states = []
    for index, kind in enumerate(config.layer_types):
        line = latent(config if layers is None else layers[index])
        if kind != "indexed_attention":
            states.append(line)
        elif own is not None and own[index] != "full":
            states.append(LayerState("indexed", line.pages))
        else:
            states.append(LayerState("indexed", (*line.pages, Pages(1, 1, config.index_head_dim))))
    return tuple(states)


def _chosen_blocks(config: Any, layout: ShardLayout) -> LayerStates:
    """MiniMax M3's: keys and values everywhere, an indexer's keys beside them where it chooses blocks."""
    own = _attention(layout)
    indexed = LayerState("indexed", (*own.pages, Pages(1, 1, config.index_head_dim)))
    return tuple(own if kind == "full_attention" else indexed for kind in config.layer_types)


def _compressed(config: Any, layout: ShardLayout) -> LayerStates:
    """DeepSeek V4's: the lines of the last tokens, and a line of every few tokens in layers that see further."""
    window = StateTensor("window", (config.sliding_window, config.head_dim), fp32=False)

    def given(name: str, tokens: int, widths: int) -> StateTensor:
        """What lines are made of: values and gates of the last tokens."""
        return StateTensor(name, (tokens, 2 * widths), fp32=False)

    heavy, sparse = (config.compress_rates[kind] for kind in _COMPRESSED)
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


_COMPRESSED = ("heavily_compressed_attention", "compressed_sparse_attention")


def _latent(config: Any, layout: ShardLayout) -> LayerStates:
    return (latent(config),) * int(config.num_hidden_layers)


def delta_heads(config: Any, layout: ShardLayout) -> ShardLayout:
    """How the heads of gated delta rules are split: value heads in groups over key heads, as queries are over keys."""
    heads = HeadCounts(
        config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    )
    return ShardLayout.of(heads, layout.world_size, layout.rank)


def linear_heads(config: Any, layout: ShardLayout) -> ShardLayout:
    """How the heads of linear attention are split that each have a key and a value of their own."""
    count = getattr(config, "linear_num_heads", config.num_attention_heads)
    size = getattr(config, "linear_head_dim", layout.head_dim)
    return ShardLayout.of(HeadCounts(count, count, size), layout.world_size, layout.rank)


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
    return _mixed(config, layout, recurrent)


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
        (*_attention(layout).pages, Pages(1, 1, width, tokens)),
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


def _linear(config: Any, layout: ShardLayout) -> LayerStates:
    """MiniMax's: a matrix for each head, in layers with lightning attention."""
    heads = linear_heads(config, layout)
    matrix = StateTensor("recurrent", (heads.q_heads.size, heads.head_dim, heads.head_dim))
    return _mixed(config, layout, LayerState("recurrent", slot=(matrix,)))


def _kimi_delta(config: Any, layout: ShardLayout) -> LayerStates:
    """Kimi's: three layers with its delta attention for each with latent attention."""
    heads = linear_heads(config, layout)
    count, size = heads.q_heads.size, heads.head_dim
    window = StateTensor("conv", (3 * count * size, config.linear_conv_kernel_dim - 1), fp32=False)
    state = LayerState("recurrent", slot=(window, StateTensor("recurrent", (count, size, size))))
    return tuple(state if kind == "linear_attention" else latent(config) for kind in config.layer_types)


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


def _short_convolution(config: Any, layout: ShardLayout) -> LayerStates:
    """LFM's: layers that are a convolution over a few tokens, between two gates, and some with attention."""
    channels = layout.dimension(config.hidden_size).size
    window = StateTensor("conv", (channels, config.conv_L_cache - 1), fp32=False)
    return _mixed(config, layout, LayerState("recurrent", slot=(window,)))


@dataclass(frozen=True)
class ScanSizes:
    """Of the selective scan of Mamba 1 and its kin, whole."""

    heads: int
    width: int
    """Channels of a head."""
    states: int
    """Numbers that a channel keeps."""
    rank: int
    """Width of what the steps are made of."""
    kernel: int
    """Tokens that the convolution sees."""

    @classmethod
    def of(cls, config: Any) -> "ScanSizes":
        if hasattr(config, "state_size"):
            sizes = (config.state_size, config.time_step_rank, config.conv_kernel)
            return cls(1, config.intermediate_size, *sizes)
        heads = getattr(config, "n_mamba_heads", 1)
        width = config.mamba_expand * config.hidden_size // heads
        return cls(heads, width, config.mamba_d_state, config.mamba_dt_rank, config.mamba_d_conv)


def _selective_scan(config: Any, layout: ShardLayout) -> LayerStates:
    """Mamba 1's: a few numbers for each channel; in Jamba between layers with attention, in Zamba in all layers, some
    of which attend before."""
    sizes = ScanSizes.of(config)
    width = layout.dimension(sizes.width).size
    return _recurrent_layers(
        config,
        layout,
        StateTensor("conv", (sizes.heads * width, sizes.kernel - 1), fp32=False),
        StateTensor("recurrent", (sizes.heads, width, sizes.states)),
    )


@dataclass(frozen=True)
class StateSpaceSizes:
    """Of Mamba 2's mixers, whole."""

    heads: int
    groups: int
    """Of heads that share what they multiply with"""
    head_dim: int
    state: int
    """Numbers that each value of a head keeps"""
    kernel: int
    """Tokens that the convolution sees"""

    @classmethod
    def of(cls, config: Any) -> "StateSpaceSizes":
        return cls(*(int(getattr(config, name)) for name in family_of(config.model_type).state_sizes))

    def heads_of(self, layout: ShardLayout) -> ShardLayout:
        """How they are split over the ranks of `layout`: in groups, as queries are over keys."""
        return ShardLayout.of(
            HeadCounts(self.heads, self.groups, self.head_dim), layout.world_size, layout.rank
        )


def _state_space(config: Any, layout: ShardLayout) -> LayerStates:
    """Mamba 2's: a matrix for each head, in layers between such with attention, or beside it."""
    sizes = StateSpaceSizes.of(config)
    heads = sizes.heads_of(layout)
    channels = heads.q_heads.size * sizes.head_dim + 2 * heads.kv_heads.size * sizes.state
    return _recurrent_layers(
        config,
        layout,
        StateTensor("conv", (channels, sizes.kernel - 1), fp32=False),
        StateTensor("recurrent", (heads.q_heads.size, sizes.head_dim, sizes.state)),
    )


def _recurrent_layers(config: Any, layout: ShardLayout, *slot: StateTensor) -> LayerStates:
    """Layers with `slot`, some of which attend as well, between such that attend alone or keep nothing."""
    kinds = {
        "linear_attention": LayerState("recurrent", slot=slot),
        "full_attention": _attention(layout),
        "hybrid": LayerState("hybrid", _attention(layout).pages, slot),
        **dict.fromkeys(("mlp", "moe"), LayerState("none")),
    }
    return tuple(kinds[kind] for kind in getattr(config, "layer_types", None) or config.layers_block_type)


def gate_heads(config: Any, layout: ShardLayout) -> ShardLayout:
    """How the heads of RecurrentGemma's recurrences are split."""
    count = config.num_attention_heads
    heads = HeadCounts(count, count, config.lru_width // count)
    return ShardLayout.of(heads, layout.world_size, layout.rank)


def _gated_recurrence(config: Any, layout: ShardLayout) -> LayerStates:
    """RecurrentGemma's: a number for each channel, in two layers of three."""
    heads = gate_heads(config, layout)
    width = heads.q_heads.size * heads.head_dim
    window = StateTensor("conv", (width, config.conv1d_width - 1), fp32=False)
    return _mixed(config, layout, LayerState("recurrent", slot=(window, StateTensor("recurrent", (width,)))))


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


def _mixed(config: Any, layout: ShardLayout, recurrent: LayerState) -> LayerStates:
    """`recurrent` where `layer_types` says neither full nor sliding attention."""
    kinds: dict[str, LayerState] = {
        "full_attention": _attention(layout),
        "sliding_attention": attention(layout.kv_heads.size, layout.head_dim, "sliding"),
    }
    return tuple(kinds.get(kind, recurrent) for kind in config.layer_types)


def _with_bias(config: Any, layout: ShardLayout) -> LayerStates:
    """Doge: a bias of its own for each key, stored after it."""
    return (attention(layout.kv_heads.size, layout.head_dim + KEY_BIAS_WIDTH),) * int(
        config.num_hidden_layers
    )


KEY_BIAS_WIDTH = 8
"""Values stored after a key: its bias, then zeros."""

_RULES: Mapping[States, Rule] = MappingProxyType(
    {
        "attention": _attention_everywhere,
        "biased_keys": _with_bias,
        "chosen_blocks": _chosen_blocks,
        "chunked": _chunked,
        "compressed": _compressed,
        "convolved_keys": _convolved_keys,
        "gated_delta": _gated_delta,
        "gated_delta_beside_ngrams": _gated_delta_beside_ngrams,
        "gated_recurrence": _gated_recurrence,
        "indexed": _indexed,
        "kimi_delta": _kimi_delta,
        "latent": _latent,
        "lightning": _linear,
        "matrix_memory": _matrix_memory,
        "rwkv": _rwkv,
        "selective_scan": _selective_scan,
        "shared_keys": _shared_keys,
        "short_convolution": _short_convolution,
        "state_space": _state_space,
    }
)

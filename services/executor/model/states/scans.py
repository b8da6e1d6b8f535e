"""Recurrences that fade channel by channel or head by head: Mamba 1 and 2, RG-LRU."""

from dataclasses import dataclass
from typing import Any

from services.executor.core.layer_state import LayerState, LayerStates, StateTensor
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.families.registry import family_of
from services.executor.model.states.base import LINEAR, MIXERS, MODEL, StateKind, attending, between_attention


@dataclass(frozen=True)
class ScanSizes:
    """Of the selective scan of Mamba 1 and its kin, whole."""

    heads: int
    width: int  # channels of a head
    states: int  # numbers that a channel keeps
    rank: int  # width of what the steps are made of
    kernel: int  # tokens that the convolution sees

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
    return _scanning_layers(
        config,
        layout,
        StateTensor("conv", (sizes.heads * width, sizes.kernel - 1), fp32=False),
        StateTensor("recurrent", (sizes.heads, width, sizes.states)),
    )


@dataclass(frozen=True)
class StateSpaceSizes:
    """Of Mamba 2's mixers, whole."""

    heads: int
    groups: int  # of heads that share what they multiply with
    head_dim: int
    state: int  # numbers that each value of a head keeps
    kernel: int  # tokens that the convolution sees

    @classmethod
    def of(cls, config: Any) -> "StateSpaceSizes":
        return cls(*(int(getattr(config, name)) for name in family_of(config.model_type).state_sizes))

    def heads_of(self, layout: ShardLayout) -> ShardLayout:
        """How they are split over the ranks of `layout`: in groups, as queries are over keys."""
        return ShardLayout.of(HeadCounts(self.heads, self.groups, self.head_dim), layout.world_size, layout.rank)


def _state_space(config: Any, layout: ShardLayout) -> LayerStates:
    """Mamba 2's: a matrix for each head, in layers between such with attention, or beside it."""
    sizes = StateSpaceSizes.of(config)
    heads = sizes.heads_of(layout)
    channels = heads.q_heads.size * sizes.head_dim + 2 * heads.kv_heads.size * sizes.state
    return _scanning_layers(
        config,
        layout,
        StateTensor("conv", (channels, sizes.kernel - 1), fp32=False),
        StateTensor("recurrent", (heads.q_heads.size, sizes.head_dim, sizes.state)),
    )


def _scanning_layers(config: Any, layout: ShardLayout, *slot: StateTensor) -> LayerStates:
    """Layers with `slot`, some of which attend as well, between such that attend alone or keep nothing."""
    kinds = {
        "linear_attention": LayerState("recurrent", slot=slot),
        "full_attention": attending(layout),
        "hybrid": LayerState("hybrid", attending(layout).pages, slot),
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
    return between_attention(config, layout, LayerState("recurrent", slot=(window, StateTensor("recurrent", (width,)))))


SELECTIVE_SCAN = StateKind(
    "selective_scan",
    _selective_scan,
    shown={"recurrent": "Mamba"},
    layer_types=LINEAR,
    splits={
        "": f"{MIXERS}.diagonal_recurrence:selective_scan",
        "selective_scan_by_heads": f"{MIXERS}.diagonal_recurrence:selective_scan_by_heads",
    },
)
STATE_SPACE = StateKind(
    "state_space",
    _state_space,
    shown={"recurrent": "Mamba 2|state[- ]space|SSM"},
    layer_types=LINEAR,
    splits={"": f"{MIXERS}.state_space:state_space"},
    lowered={"GraniteMoeHybridMambaLayer": f"{MODEL}.lowered_recurrent:state_space"},
)
GATED_RECURRENCE = StateKind(
    "gated_recurrence",
    _gated_recurrence,
    shown={"recurrent": "recurr|LRU"},
    layer_types=LINEAR,
    splits={"": f"{MIXERS}.diagonal_recurrence:gated_recurrence"},
)

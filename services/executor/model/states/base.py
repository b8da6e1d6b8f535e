"""The interface of kinds of state, and what several of them keep.

    StateKind ──▶ layer_states.py          pages in KV blocks and tensors in slots, of each layer and one rank
              ──▶ parallel/splitting.py    how modules are split over the ranks, and find what they keep
              ──▶ lowering.py              which of them kernels compute
              ──▶ supported.py             what the list of models calls it

The rest follows from pages and slots, alike for every kind: bytes (`kv_cache/store_shape.py`); blocks are shared,
evicted, spilled and handed over as those of keys and values; a slot is zeros where a sequence begins, and its snapshots
are blocks like others (`scheduler/state_slots.py`).

Lists of models are printed without PyTorch, so declarations import none of it: they name what computes as
`module:function`, which is imported when a model is built.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from services.executor.core.layer_state import LayerState, LayerStates, Pages, attention
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.families.registry import family_of

LINEAR = ("linear_attention",)
MODEL = "services.executor.model"
MIXERS = f"{MODEL}.parallel.mixers"


class StatePlace(NamedTuple):
    """Where a layer's module finds what it keeps."""

    config: Any
    layout: ShardLayout  # of the layer's attention heads
    state: LayerState
    page: int  # the store's page layer that is the first of its pages
    slot: int  # its layer among those with a slot


@dataclass(frozen=True)
class StateKind:
    """The one declaration of a kind."""

    name: str  # by which families name it (`ModelFamily.states`)
    # What each layer of a model of this text configuration keeps on the rank of a layout: sizes follow the rank's
    # heads, as its weights do.
    layers: Callable[[Any, ShardLayout], LayerStates]
    # What `ryzanstein models list --supported` calls it, and a pattern of the catalogue's texts that tell of it.
    shown: Mapping[str, str] = field(default_factory=dict)
    # What `layer_types` of configurations call layers that keep it, unless a family says otherwise.
    layer_types: tuple[str, ...] = ()
    has_latents: bool = False  # whether attention is latent in those layers that attend
    # Prepares each attention module over pages: `(module, StatePlace)`; empty: they are as those of all models.
    attention: str = ""
    # Makes each module with a slot compute whole steps and attend by itself: `(module, StatePlace)`; empty: modules
    # are called over their slots as `recurrent.py` does.
    mixer: str = ""
    # How modules with a slot are split, by `ModelFamily.mixer`: `(config, layout)`, a `MixerSplit`,
    # or one for each module's name.
    splits: Mapping[str, str] = field(default_factory=dict)
    # By classes of transformers' modules: what describes them to the CPU's kernels. `(module)`, a `Recurrent`. By
    # name, because structure alone does not tell what a forward pass does.
    lowered: Mapping[str, str] = field(default_factory=dict)


def layer_layouts(config: Any, layout: ShardLayout) -> tuple[ShardLayout, ...]:
    """How the attention heads of each layer are split: as `layout` has it, unless layers have heads of their own."""
    if by_layer := family_of(config.model_type).heads_by_layer:
        heads = _HEADS[by_layer](config)
    elif getattr(config, "is_heterogeneous", False):
        heads = tuple(HeadCounts.from_config(layer) for layer in config.per_layer_config)
    else:
        return (layout,) * int(config.num_hidden_layers)
    return tuple(ShardLayout.of(counts, layout.world_size, layout.rank) for counts in heads)


def _laguna_heads(config: Any) -> Iterable[HeadCounts]:
    """Laguna: other query heads in other layers."""
    for heads in config.num_attention_heads_per_layer:
        yield HeadCounts(heads, config.num_key_value_heads, config.head_dim)


def _mimo_heads(config: Any) -> Iterable[HeadCounts]:
    """MiMo V2 Flash: twice the KV heads where a layer sees a window, and narrower values."""
    for kind in config.layer_types:
        kv_heads = config.num_key_value_heads * (2 if kind == "sliding_attention" else 1)
        yield HeadCounts(config.num_attention_heads, kv_heads, config.head_dim, config.v_head_dim)


# The heads of each layer, by `heads_by_layer` of a family.
_HEADS: Mapping[str, Callable[[Any], Iterable[HeadCounts]]] = MappingProxyType(
    {"listed": _laguna_heads, "wider_windows": _mimo_heads}
)


def attending(layout: ShardLayout, layer_type: str = "full_attention") -> LayerState:
    """Keys and values of a layer of that type."""
    kind = "sliding" if layer_type == "sliding_attention" else "full"
    return attention(layout.kv_heads.size, max(layout.head_dim, layout.value_dim), kind)


def latent_line(config: Any) -> LayerState:
    """Of every token the latent and the rotated part of its key, one line for all heads: whole on each rank."""
    return LayerState("latent", (Pages(1, 1, config.kv_lora_rank + config.qk_rope_head_dim),))


def linear_heads(config: Any, layout: ShardLayout) -> ShardLayout:
    """How the heads of linear attention are split that each have a key and a value of their own."""
    count = getattr(config, "linear_num_heads", config.num_attention_heads)
    size = getattr(config, "linear_head_dim", layout.head_dim)
    return ShardLayout.of(HeadCounts(count, count, size), layout.world_size, layout.rank)


def between_attention(config: Any, layout: ShardLayout, recurrent: LayerState) -> LayerStates:
    """`recurrent` where `layer_types` says neither full nor sliding attention."""
    kinds: dict[str, LayerState] = {
        "full_attention": attending(layout),
        "sliding_attention": attention(layout.kv_heads.size, layout.head_dim, "sliding"),
    }
    return tuple(kinds.get(kind, recurrent) for kind in config.layer_types)

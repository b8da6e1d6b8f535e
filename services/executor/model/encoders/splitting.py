"""How an encoder's layers are split over the ranks of a ring: heads, and the inner width of the feed-forward.

transformers has a plan for one encoder alone; their layers are alike, so that names tell. A rank holds its heads'
outputs of the projections and its part of the inner width, and what follows sums over the ranks. Of fewer heads of keys
and values than ranks, several ranks hold the same one. All else is whole on every rank.
"""

import re
from typing import Any

from torch import nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import HeadCounts, ShardLayout, ShardRange, split, split_dimension
from services.executor.model.encoders.families import check_ranks
from services.executor.model.parallel.layers import ColumnParallelLinear, RowParallelLinear, halves, shifted

_QUERIES = re.compile(r"(self|attention|self_attn)\.(query|q_lin|q_proj)$")
_KEYS = re.compile(r"(self|attention|self_attn)\.(key|value|[kv]_lin|[kv]_proj)$")
_FUSED = re.compile(r"attn\.Wqkv$")  # [all q | all k | all v]
_OF_HEADS = re.compile(r"(attention\.(output\.dense|dense|out_lin)|self_attn\.o_proj|attn\.Wo)$")
_INNER = re.compile(r"(intermediate\.dense|ffn\.lin1|mlp\.(gate_proj|up_proj|fc1)|\d\.ffn)$")
_TWO_INNER = re.compile(r"mlp\.Wi$")  # [up | gate]
_OF_INNER = re.compile(r"(\d\.output\.dense|ffn\.lin2|mlp\.(down_proj|fc2|Wo)|ffn_output)$")


def split_encoder(base: nn.Module, config: Any, collectives: Collectives) -> None:
    """Replaces the linear layers of `base`, with its parameters on the meta device, by this rank's share of them, in
    place. Raises `ConfigurationError` where there are more ranks than can have a share."""
    check_ranks(config, collectives.world_size)
    if collectives.world_size == 1:
        return
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and (share := _share(name, module, config, collectives)) is not None:
            base.set_submodule(name, share)


def _share(name: str, linear: nn.Linear, config: Any, collectives: Collectives) -> nn.Module | None:
    """What a rank holds of the layer `name`; None: all of it."""
    world, rank = collectives.world_size, collectives.rank
    width = linear.out_features
    queries, keys = _heads(config, world, rank)
    if _QUERIES.search(name):
        return ColumnParallelLinear(linear, queries.scaled(width // config.num_attention_heads))
    if _KEYS.search(name):
        return ColumnParallelLinear(linear, keys.scaled(width // _key_heads(config)))
    if _FUSED.search(name):
        one = width // 3
        span = queries.scaled(one // config.num_attention_heads)
        return ColumnParallelLinear(linear, span, shifted(span, one), shifted(span, 2 * one))
    if _OF_HEADS.search(name):
        span = queries.scaled(linear.in_features // config.num_attention_heads)
        return RowParallelLinear(linear, span, collectives)
    if _INNER.search(name):
        return ColumnParallelLinear(linear, split_dimension(width, world)[rank])
    if _TWO_INNER.search(name):
        return ColumnParallelLinear(linear, *halves(split_dimension(width // 2, world)[rank], width // 2))
    if _OF_INNER.search(name):
        return RowParallelLinear(linear, split_dimension(linear.in_features, world)[rank], collectives)
    return None


def _heads(config: Any, ranks: int, rank: int) -> tuple[ShardRange, ShardRange]:
    """A rank's heads of queries, and of keys and values. Raises `ConfigurationError` where it has none."""
    total = HeadCounts(config.num_attention_heads, _key_heads(config), 1)
    if total.kv_heads >= ranks:
        own = split(total.kv_heads, ranks)[rank]
        return own.scaled(total.q_heads // total.kv_heads), own
    layout = ShardLayout.of(total, ranks, rank)
    return layout.q_heads, layout.kv_heads


def _key_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

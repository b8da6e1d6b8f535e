"""Convolutions over a few tokens: how their modules are split over the ranks.

convolved keys      q_proj, k_proj and the convolutions over both by heads;  v_proj_current: the first half of all
                    values, v_proj_delayed: the second, of which a rank holds what its heads have
short convolution   in_proj               [B | C | x], channel by channel as conv and the inputs of out_proj
"""

from typing import Any

from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.parallel.layers import merged, shifted
from services.executor.model.parallel.mixers.split import MixerSplit
from services.executor.model.states.convolutions import delayed_values


def short_convolution(config: Any, layout: ShardLayout) -> MixerSplit:
    width = config.hidden_size
    span = layout.dimension(width)
    return MixerSplit(
        outputs={"in_proj": merged([span, shifted(span, width), shifted(span, 2 * width)])},
        channels={"conv": (span,)},
        inputs={"out_proj": (span, 0)},
    )


def convolved_keys(config: Any, layout: ShardLayout) -> MixerSplit:
    size, total = layout.head_dim, layout.total
    queries, keys = layout.q_heads.scaled(size), layout.kv_heads.scaled(size)
    half = total.kv_heads * size // 2
    current = (ShardRange(min(keys.start, half), min(keys.stop, half)),)
    both = merged([queries, shifted(keys, total.q_heads * size)])
    return MixerSplit(
        outputs={
            "q_proj": (queries,),
            "k_proj": (keys,),
            "v_proj_current": current,
            "v_proj_delayed": (delayed_values(layout),),
        },
        channels={"conv_qk_depthwise": both, "conv_qk_grouped": both},
    )

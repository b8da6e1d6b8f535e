"""How modules that keep recurrent state are split over the ranks: by their heads, as attention is.

The state of a head is one rank's, with all that makes it: the rows of the projections, the channels of the
convolution, the numbers of each head. What comes out is multiplied by that rank's inputs of the output projection,
and summed over the ranks.

    gated delta rule    in_proj_qkv, conv1d   [all q | all k | all v] by key and value heads
                        in_proj_z             by value heads;  in_proj_a, in_proj_b, A_log, dt_bias: one number each
                        out_proj              inputs by value heads
      Qwen 3 Next's     in_proj_qkvz          [q k | its values | their gates] of a key head, then the next one's
                        in_proj_ba            [b of its value heads | a of them], likewise
      OLMo Hybrid's     q_proj, k_proj, v_proj, g_proj, a_proj, b_proj, o_proj
    Kimi's delta rule   q_proj, k_proj, v_proj, gates, conv1d, dt_bias, o_proj by heads; b_proj, A_log: one number each
    lightning           qkv_proj              [q k v] of a head, then the next one's
                        output_gate, norm, out_proj by heads
    convolved keys      q_proj, k_proj and the convolutions over both by heads;  v_proj_current: the first half of all
                        values, v_proj_delayed: the second, of which a rank holds what its heads have
    short convolution   in_proj               [B | C | x], channel by channel as conv and the inputs of out_proj
      Qwen 4's          as Qwen 3.5's;  embeddings of a token with those before it: the table by rows (`splitting.py`)
    compressed          q_b_proj, sinks by heads;  o_a_proj, o_b_proj: all of the groups in which the rank has heads

Mamba 1 and RG-LRU stand in `diagonal_recurrence.py`, Mamba 2 in `state_space.py`, RWKV in `rwkv.py`, mLSTM in
`matrix_memory.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.layer_states import delayed_values, delta_heads, linear_heads
from services.executor.model.lightning import DERIVED, fade_by_heads
from services.executor.model.parallel.compressed_attention import output_groups
from services.executor.model.parallel.diagonal_recurrence import (
    gated_recurrence,
    selective_scan,
    selective_scan_by_heads,
)
from services.executor.model.parallel.layers import WideNorm, merged, shifted
from services.executor.model.parallel.matrix_memory import matrix_memory
from services.executor.model.parallel.mixer_split import MixerSplit, Spans, output_span
from services.executor.model.parallel.rwkv import rwkv
from services.executor.model.parallel.state_space import state_space
from services.executor.model.recurrent import remember_tokens


class _DeltaSpans:
    """What a rank holds of the projections of a gated delta rule."""

    def __init__(self, config: Any, layout: ShardLayout) -> None:
        heads = self.heads = delta_heads(config, layout)
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = heads.kv_heads.scaled(key_dim), heads.q_heads.scaled(value_dim)
        all_keys = heads.total.kv_heads * key_dim
        self.qkv = merged(
            [self.keys, shifted(self.keys, all_keys), shifted(self.values, 2 * all_keys)],
        )
        self.one_each = (heads.q_heads,)

    def of_groups(self, before: int, *widths: int) -> Spans:
        """Of [`before` rows | a part of each of `widths` for each of its value heads], one after another for each
        key head."""
        group = self.heads.total.q_heads // self.heads.total.kv_heads
        spans = []
        for index in range(self.heads.kv_heads.size):
            head = self.heads.kv_heads.start + index
            at = head * (before + group * sum(widths))
            spans.append(ShardRange(at, at + before))
            first = self.heads.q_heads.start + index * self.heads.q_per_kv - head * group
            at += before
            for width in widths:
                spans.append(shifted(ShardRange(first, first + self.heads.q_per_kv).scaled(width), at))
                at += group * width
        return merged(spans)


def _gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    spans = _DeltaSpans(config, layout)
    return _delta_split(
        config,
        spans,
        {
            "in_proj_qkv": spans.qkv,
            "in_proj_z": (spans.values,),
            "in_proj_a": spans.one_each,
            "in_proj_b": spans.one_each,
        },
    )


def _grouped_gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    spans = _DeltaSpans(config, layout)
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    qkvz = spans.of_groups(2 * key_dim, value_dim, value_dim)
    return _delta_split(config, spans, {"in_proj_qkvz": qkvz, "in_proj_ba": spans.of_groups(0, 1, 1)})


def _separate_gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    spans = _DeltaSpans(config, layout)
    outputs = {
        **dict.fromkeys(("q_proj", "k_proj"), (spans.keys,)),
        **dict.fromkeys(("v_proj", "g_proj"), (spans.values,)),
        **dict.fromkeys(("a_proj", "b_proj"), spans.one_each),
    }
    return _delta_split(config, spans, outputs, "o_proj")


def _delta_split(
    config: Any, spans: _DeltaSpans, outputs: Mapping[str, Spans], output: str = "out_proj"
) -> MixerSplit:
    heads, keys, values = spans.heads, spans.keys, spans.values
    return MixerSplit(
        outputs=outputs,
        channels={"conv1d": spans.qkv},
        values={"A_log": spans.one_each, "dt_bias": spans.one_each},
        inputs={output: output_span(heads, config.linear_value_head_dim)},
        attributes={
            "num_k_heads": heads.kv_heads.size,
            "num_v_heads": heads.q_heads.size,
            "key_dim": keys.size,
            "value_dim": values.size,
        },
    )


def _lightning(config: Any, layout: ShardLayout) -> MixerSplit:
    heads = linear_heads(config, layout)
    size = heads.head_dim
    span, counted = heads.q_heads.scaled(size), heads.output_heads.scaled(size)
    return MixerSplit(
        outputs={"qkv_proj": (heads.q_heads.scaled(3 * size),), "output_gate": (span,)},
        replaced={"norm": lambda norm, ranks: WideNorm(norm, span, counted, ranks)},
        inputs={"out_proj": output_span(heads, size)},
        let_go=DERIVED,
        adapt=lambda module, collectives: fade_by_heads(module, heads.q_heads),
    )


def _kimi_delta(
    config: Any, layout: ShardLayout, gates: Sequence[str] = ("g_proj", "forget_gate.f_proj")
) -> MixerSplit:
    """Kimi's delta attention: the gated delta rule, with a decay for each channel of a key. The first of two factors of
    a gate, one head wide, is whole on every rank."""
    heads = linear_heads(config, layout)
    size, count = heads.head_dim, heads.total.q_heads
    span, one_each = heads.q_heads.scaled(size), (heads.q_heads,)
    qkv = merged([shifted(span, part * count * size) for part in range(3)])
    return MixerSplit(
        outputs={**dict.fromkeys(("q_proj", "k_proj", "v_proj", *gates), (span,)), "b_proj": one_each},
        channels={"conv1d": qkv},
        values={"forget_gate.A_log": one_each, "forget_gate.dt_bias": (span,)},
        inputs={"o_proj": output_span(heads, size)},
        attributes={
            "qkv_dim": span.size,
            "num_heads": heads.q_heads.size,
            "forget_gate.num_heads": heads.q_heads.size,
        },
    )


def _convolved_keys(config: Any, layout: ShardLayout) -> MixerSplit:
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


def _delta_beside_ngrams(config: Any, layout: ShardLayout) -> Mapping[str, MixerSplit]:
    """Qwen 4's: its embeddings of a token with those before it are whole on every rank but for their table."""
    ngrams = MixerSplit(adapt=lambda module, collectives: remember_tokens(module.ple_embedding))
    return {"linear_attn": _gated_delta(config, layout), "ple": ngrams}


def _compressed(config: Any, layout: ShardLayout) -> MixerSplit:
    groups = output_groups(config, layout)
    inner = groups.scaled(config.o_lora_rank)
    return MixerSplit(
        outputs={"q_b_proj": (layout.q_heads.scaled(layout.head_dim),)},
        values={"sinks": (layout.q_heads,), "o_a_proj.weight": (inner,)},
        inputs={"o_b_proj": (inner, 0)},
        attributes={"num_heads": layout.q_heads.size, "o_a_proj.n_groups": groups.size},
    )


def _short_convolution(config: Any, layout: ShardLayout) -> MixerSplit:
    width = config.hidden_size
    span = layout.dimension(width)
    return MixerSplit(
        outputs={"in_proj": merged([span, shifted(span, width), shifted(span, 2 * width)])},
        channels={"conv": (span,)},
        inputs={"out_proj": (span, 0)},
    )


MIXERS: Mapping[str, Callable[[Any, ShardLayout], MixerSplit | Mapping[str, MixerSplit]]] = MappingProxyType(
    {
        "compressed": _compressed,
        "convolved_keys": _convolved_keys,
        "factored_kimi_delta": partial(_kimi_delta, gates=("g_b_proj", "forget_gate.f_b_proj")),
        "gated_delta": _gated_delta,
        "gated_delta_beside_ngrams": _delta_beside_ngrams,
        "gated_recurrence": gated_recurrence,
        "grouped_gated_delta": _grouped_gated_delta,
        "kimi_delta": _kimi_delta,
        "lightning": _lightning,
        "matrix_memory": matrix_memory,
        "rwkv": rwkv,
        "selective_scan": selective_scan,
        "selective_scan_by_heads": selective_scan_by_heads,
        "separate_gated_delta": _separate_gated_delta,
        "short_convolution": _short_convolution,
        "state_space": state_space,
    }
)
"""By `mixer` of a family, or its `states`; where several modules of a layer keep state, of each by its name."""

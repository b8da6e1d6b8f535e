"""Delta rules: how their modules are split over the ranks, by their heads, as attention is.

The state of a head is one rank's, with all that makes it: the rows of the projections, the channels of the
convolution, the numbers of each head. What comes out is multiplied by that rank's inputs of the output projection,
and summed over the ranks.

    gated delta rule    in_proj_qkv, conv1d   [all q | all k | all v] by key and value heads
                        in_proj_z             by value heads;  in_proj_a, in_proj_b, A_log, dt_bias: one number each
                        out_proj              inputs by value heads
      Qwen 3 Next's     in_proj_qkvz          [q k | its values | their gates] of a key head, then the next one's
                        in_proj_ba            [b of its value heads | a of them], likewise
      OLMo Hybrid's     q_proj, k_proj, v_proj, g_proj, a_proj, b_proj, o_proj
      Qwen 4's          as Qwen 3.5's;  embeddings of a token with those before it: the table by rows (`splitting.py`)
    Kimi's delta rule   q_proj, k_proj, v_proj, gates, conv1d, dt_bias, o_proj by heads; b_proj, A_log: one number each
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.parallel.layers import merged, shifted
from services.executor.model.parallel.mixers.split import MixerSplit, Spans, output_span
from services.executor.model.recurrent import remember_tokens
from services.executor.model.states.base import linear_heads
from services.executor.model.states.delta_rules import delta_heads


class _DeltaSpans:
    """What a rank holds of the projections of a gated delta rule."""

    def __init__(self, config: Any, layout: ShardLayout) -> None:
        heads = self.heads = delta_heads(config, layout)
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = heads.kv_heads.scaled(key_dim), heads.q_heads.scaled(value_dim)
        all_keys = heads.total.kv_heads * key_dim
        self.qkv = merged([self.keys, shifted(self.keys, all_keys), shifted(self.values, 2 * all_keys)])
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


def gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
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


def grouped_gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    spans = _DeltaSpans(config, layout)
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    qkvz = spans.of_groups(2 * key_dim, value_dim, value_dim)
    return _delta_split(config, spans, {"in_proj_qkvz": qkvz, "in_proj_ba": spans.of_groups(0, 1, 1)})


def separate_gated_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    spans = _DeltaSpans(config, layout)
    outputs = {
        **dict.fromkeys(("q_proj", "k_proj"), (spans.keys,)),
        **dict.fromkeys(("v_proj", "g_proj"), (spans.values,)),
        **dict.fromkeys(("a_proj", "b_proj"), spans.one_each),
    }
    return _delta_split(config, spans, outputs, "o_proj")


def _delta_split(config: Any, spans: _DeltaSpans, outputs: Mapping[str, Spans], output: str = "out_proj") -> MixerSplit:
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


def kimi_delta(config: Any, layout: ShardLayout, gates: Sequence[str] = ("g_proj", "forget_gate.f_proj")) -> MixerSplit:
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
        attributes={"qkv_dim": span.size, "num_heads": heads.q_heads.size, "forget_gate.num_heads": heads.q_heads.size},
    )


def factored_kimi_delta(config: Any, layout: ShardLayout) -> MixerSplit:
    return kimi_delta(config, layout, ("g_b_proj", "forget_gate.f_b_proj"))


def delta_beside_ngrams(config: Any, layout: ShardLayout) -> Mapping[str, MixerSplit]:
    """Qwen 4's: its embeddings of a token with those before it are whole on every rank but for their table."""
    ngrams = MixerSplit(adapt=lambda module, collectives: remember_tokens(module.ple_embedding))
    return {"linear_attn": gated_delta(config, layout), "ple": ngrams}

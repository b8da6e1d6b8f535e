"""Words of parallel plans: what of a module one rank holds, and parts that plans have in common.

    pattern     "self_attn.q_proj"      relative to a decoder layer; `*` stands for one part of a name
    style       what is cut, see `Style`

A module that no pattern names is replicated: every rank computes all of it. That is exact as long as its
input is whole on every rank, so whatever follows a split module must be split as well.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType


class Style(Enum):
    """What of a module one rank holds."""

    COLUMN = auto()  # a span of a linear layer's outputs
    ROW = auto()  # a span of a linear layer's inputs; the outputs are summed over the ranks
    ROW_OF_WHOLE = auto()  # as ROW, where what it is given is whole on every rank
    GATE_UP = auto()  # the same span of two projections whose outputs stand one after the other: [gate | up]
    QUERY = auto()  # the outputs of this rank's query heads; of a gate there may be one each
    GATED_QUERY = auto()  # as QUERY, with the gate of each head's output behind its query
    # What makes keys and values of a latent (`latent.py`): the outputs of this rank's query heads.
    LATENT = auto()
    KEY_VALUE = auto()  # the outputs of this rank's KV heads
    OUTPUT = auto()  # the inputs from this rank's query heads; the outputs are summed over the ranks
    KEYS_VALUES = auto()  # two projections whose outputs stand one after the other: [all k | all v]
    QKV_BLOCKS = auto()  # three projections whose outputs stand one after the other: [all q | all k | all v]
    # The query heads of a KV head, its key, its value, then the next KV head's: [q0 q1 k0 v0 | q2 ...].
    #
    # With as many KV heads as query heads: [q0 k0 v0 | q1 k1 v1 | ...]; with one: [all q | k | v].
    QKV_BY_GROUP = auto()
    # The first fourth of the heads: [its q | its v | its k], then the second's. A rank holds [q | k | v].
    QVK_BY_FOURTH = auto()
    # The outputs of this rank's query heads, where head i and head i + n/2, of n, make one.
    QUERY_PAIRS = auto()
    KEY_VALUE_PAIRS = auto()
    # The second factor of what is added to queries: the outputs of this rank's query heads.
    QUERY_ADAPTER = auto()
    KEY_VALUE_ADAPTER = auto()
    KEY_VALUE_INPUT = auto()  # the inputs from this rank's KV heads; the outputs are summed over the ranks
    # An RMS norm over the values of all query heads at once: the ranks sum their squares.
    QUERY_WIDE_NORM = auto()
    KEY_WIDE_NORM = auto()
    INNER_WIDE_NORM = auto()  # an RMS norm over the outputs of a column layer: the ranks sum their squares
    QUERY_HEAD_NORM = auto()  # a norm within each query head, with other weights for each head
    KEY_HEAD_NORM = auto()
    QUERY_HEAD_SCALARS = auto()  # one number for each query head (attention sinks)
    KEY_HEAD_SCALARS = auto()
    # All experts on every rank, a span of the inner width of each; the outputs are summed over the ranks.
    EXPERTS = auto()
    # JetMoe's experts: a span of the inner width of each, or the KV heads of experts that make queries.
    EXPERT_STACKS = auto()
    WHOLE = auto()  # all of it on every rank
    # The same, of a linear layer whose weight may be quantized as those that are split are.
    WHOLE_LINEAR = auto()


Plan = Mapping[str, Style]


def plan(*parts: Plan) -> Plan:
    merged: dict[str, Style] = {}
    for part in parts:
        merged.update(part)
    return MappingProxyType(merged)


def under(prefix: str, plan: Plan) -> Plan:
    return {f"{prefix}.{name}": style for name, style in plan.items()}


QKV: Plan = {"q_proj": Style.QUERY, "k_proj": Style.KEY_VALUE, "v_proj": Style.KEY_VALUE}
QKVO: Plan = {**QKV, "o_proj": Style.OUTPUT}
QKV_OUT: Plan = {**QKV, "out_proj": Style.OUTPUT}
WIDE_NORMS: Plan = {"q_norm": Style.QUERY_WIDE_NORM, "k_norm": Style.KEY_WIDE_NORM}
HEAD_NORMS: Plan = {"q_norm": Style.QUERY_HEAD_NORM, "k_norm": Style.KEY_HEAD_NORM}
GATED: Plan = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
FUSED_GATED: Plan = {"gate_up_proj": Style.GATE_UP, "down_proj": Style.ROW}
W123: Plan = {"w1": Style.COLUMN, "w3": Style.COLUMN, "w2": Style.ROW}
EXPERTS: Plan = {"experts": Style.EXPERTS}
NEOX_MLP = {"mlp.dense_h_to_4h": Style.COLUMN, "mlp.dense_4h_to_h": Style.ROW}
GPTJ_MLP = {"mlp.fc_in": Style.COLUMN, "mlp.fc_out": Style.ROW}
GPT2_MLP = {"mlp.c_fc": Style.COLUMN, "mlp.c_proj": Style.ROW}


def neox_like(attention: str) -> Plan:
    fused = {"query_key_value": Style.QKV_BY_GROUP, "dense": Style.OUTPUT}
    return plan(under(attention, fused), NEOX_MLP)


LLAMA_LIKE = plan(under("self_attn", QKVO), under("mlp", GATED))
GPT2_LIKE = plan({"attn.c_attn": Style.QKV_BLOCKS, "attn.c_proj": Style.OUTPUT}, GPT2_MLP)
OPT_LIKE = plan(under("self_attn", QKV_OUT), {"fc1": Style.COLUMN, "fc2": Style.ROW})
OLMO2_LIKE = plan(LLAMA_LIKE, under("self_attn", WIDE_NORMS))
COHERE_LIKE = plan(LLAMA_LIKE, under("self_attn", HEAD_NORMS))
MOE = plan(under("self_attn", QKVO), under("mlp", EXPERTS))
OLMOE_LIKE = plan(MOE, under("self_attn", WIDE_NORMS))
GRANITE_MOE = plan(under("self_attn", QKVO), under("block_sparse_moe", EXPERTS))
GRANITE_MOE_SHARED = plan(
    GRANITE_MOE, {"shared_mlp.input_linear": Style.GATE_UP, "shared_mlp.output_linear": Style.ROW}
)
SINKS: Plan = {"self_attn.sinks": Style.QUERY_HEAD_SCALARS}
HYBRID = plan(under("self_attn", QKVO), under("feed_forward", GATED))
GATED_ATTENTION: Plan = {**QKVO, "q_proj": Style.GATED_QUERY}
QWEN3_5_MOE = plan(MOE, under("self_attn", GATED_ATTENTION), under("mlp.shared_expert", GATED))
GLM_LIKE = plan(under("self_attn", QKVO), under("mlp", FUSED_GATED))

LATENT: Plan = {
    "q_b_proj": Style.QUERY,
    "kv_b_proj": Style.LATENT,
    "o_proj": Style.OUTPUT,
    # What comes before heads: of all of them, and a norm spans it.
    "q_a_proj": Style.WHOLE_LINEAR,
    "q_a_layernorm": Style.WHOLE,
    "kv_a_proj_with_mqa": Style.WHOLE_LINEAR,
    "kv_a_layernorm": Style.WHOLE,
}
WHOLE_QUERIES: Plan = {"self_attn.q_proj": Style.QUERY}  # of those that make queries in one product, too
LATENT_DENSE = plan(under("self_attn", LATENT), under("mlp", GATED))
LATENT_MOE = plan(LATENT_DENSE, under("mlp", EXPERTS), under("mlp.shared_experts", GATED))

INDEXED = plan(LATENT_MOE, {"self_attn.indexer.*": Style.WHOLE})

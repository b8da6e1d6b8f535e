"""How each architecture's layers are split over the ranks: parallel plans as data.

A plan says for each module of a decoder layer, by a name pattern, what of it a rank holds. Most plans are
transformers' own (`base_model_tp_plan`, read as data and translated); an architecture for which
transformers has none, or one that gathers what need not be gathered, has its plan here.

    pattern     "self_attn.q_proj"      relative to a decoder layer; `*` stands for one part of a name
    style       what is cut, see `Style`

A module that no pattern names is replicated: every rank computes all of it. That is exact as long as its
input is whole on every rank, so whatever follows a split module must be split as well; `splitting.py`
checks what it can of that.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from shared.errors import ModelLoadError


class Style(Enum):
    """What of a module one rank holds."""

    COLUMN = auto()
    """A span of a linear layer's outputs."""
    ROW = auto()
    """A span of a linear layer's inputs; the outputs are summed over the ranks."""
    GATE_UP = auto()
    """The same span of two projections whose outputs stand one after the other: [gate | up]."""
    QUERY = auto()
    """The outputs of this rank's query heads."""
    KEY_VALUE = auto()
    """The outputs of this rank's KV heads."""
    OUTPUT = auto()
    """The inputs from this rank's query heads; the outputs are summed over the ranks."""
    QKV_BLOCKS = auto()
    """Three projections whose outputs stand one after the other: [all q | all k | all v]."""
    QKV_BY_GROUP = auto()
    """The query heads of a KV head, its key, its value, then the next KV head's: [q0 q1 k0 v0 | q2 ...].

    With as many KV heads as query heads: [q0 k0 v0 | q1 k1 v1 | ...]; with one: [all q | k | v].
    """
    QUERY_WIDE_NORM = auto()
    """An RMS norm over the values of all query heads at once: the ranks sum their squares."""
    KEY_WIDE_NORM = auto()
    QUERY_HEAD_NORM = auto()
    """A norm within each query head, with other weights for each head."""
    KEY_HEAD_NORM = auto()
    QUERY_HEAD_SCALARS = auto()
    """One number for each query head (attention sinks)."""
    EXPERTS = auto()
    """All experts on every rank, a span of the inner width of each; the outputs are summed over the ranks."""
    WHOLE = auto()
    """All of it on every rank."""


Plan = Mapping[str, Style]


def plan_for(config: Any) -> Plan:
    """The plan of the architecture of this transformers text configuration.

    Raises `ModelLoadError` when there is none, or when it names a style that is not known: a layer that is
    silently replicated computes nonsense as soon as its neighbour is split.
    """
    own = PLANS.get(config.model_type)
    if own is not None:
        return own
    theirs = getattr(config, "base_model_tp_plan", None)
    if not theirs:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} has no parallel plan and is not served; "
            "choose a model of another architecture (docs/models.md lists them)."
        )
    return {
        key.removeprefix(_LAYERS): _translated(key, style)
        for key, style in theirs.items()
        if key.startswith(
            _LAYERS
        )  # embeddings and the output layer are split by vocabulary, whatever it says
    }


def as_regex(pattern: str) -> re.Pattern[str]:
    """Matches the full names, relative to the base model, of the modules that `pattern` means."""
    return re.compile(r"(?:.+\.)?\d+\." + re.escape(pattern).replace(r"\*", r"[^.]+"))


_LAYERS = "layers.*."
_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_WHOLE = frozenset({"replicated", "replicate", "replicated_with_grad_allreduce"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
_ATTENTION_ROWS = frozenset({"o_proj", "out_proj", "dense"})
_EXPERT_PARAMETERS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")


def _translated(key: str, style: str) -> Style:
    """The meaning of one line of a plan of transformers. Source: transformers, `integrations/tensor_parallel`."""
    if style in _WHOLE or key.endswith(_EXPERT_PARAMETERS):  # what experts hold follows from their own line
        return Style.WHOLE
    if style == "moe_tp_experts":
        return Style.EXPERTS
    inside, leaf = ("attn" in key or "attention" in key), key.rpartition(".")[2]
    translated: Style | None = None
    if inside:
        if style in _COLUMNS:
            translated = _QKV.get(leaf)
        elif style in _ROWS and leaf in _ATTENTION_ROWS:
            translated = Style.OUTPUT
    elif style not in _GATHERED and style in _COLUMNS:
        translated = Style.COLUMN
    elif style not in _GATHERED and style in _ROWS:
        translated = Style.ROW
    if translated is None:
        raise ModelLoadError(
            f"The model's parallel plan names the style {style!r} for {key}, which is not served; "
            "choose a model of another architecture (docs/models.md lists them)."
        )
    return translated


def _plan(*parts: Plan) -> Plan:
    merged: dict[str, Style] = {}
    for part in parts:
        merged.update(part)
    return MappingProxyType(merged)


def _under(prefix: str, plan: Plan) -> Plan:
    return {f"{prefix}.{name}": style for name, style in plan.items()}


_QKV: Plan = {"q_proj": Style.QUERY, "k_proj": Style.KEY_VALUE, "v_proj": Style.KEY_VALUE}
_QKVO: Plan = {**_QKV, "o_proj": Style.OUTPUT}
_QKV_OUT: Plan = {**_QKV, "out_proj": Style.OUTPUT}
_WIDE_NORMS: Plan = {"q_norm": Style.QUERY_WIDE_NORM, "k_norm": Style.KEY_WIDE_NORM}
_HEAD_NORMS: Plan = {"q_norm": Style.QUERY_HEAD_NORM, "k_norm": Style.KEY_HEAD_NORM}
_GATED: Plan = {"gate_proj": Style.COLUMN, "up_proj": Style.COLUMN, "down_proj": Style.ROW}
_FUSED_GATED: Plan = {"gate_up_proj": Style.GATE_UP, "down_proj": Style.ROW}
_EXPERTS: Plan = {"experts": Style.EXPERTS}
_NEOX_MLP = {"mlp.dense_h_to_4h": Style.COLUMN, "mlp.dense_4h_to_h": Style.ROW}
_GPT2_MLP = {"mlp.c_fc": Style.COLUMN, "mlp.c_proj": Style.ROW}


def _neox_like(attention: str) -> Plan:
    fused = {"query_key_value": Style.QKV_BY_GROUP, "dense": Style.OUTPUT}
    return _plan(_under(attention, fused), _NEOX_MLP)


_LLAMA_LIKE = _plan(_under("self_attn", _QKVO), _under("mlp", _GATED))
_OLMO2_LIKE = _plan(_LLAMA_LIKE, _under("self_attn", _WIDE_NORMS))
_COHERE_LIKE = _plan(_LLAMA_LIKE, _under("self_attn", _HEAD_NORMS))
_MOE = _plan(_under("self_attn", _QKVO), _under("mlp", _EXPERTS))
_OLMOE_LIKE = _plan(_MOE, _under("self_attn", _WIDE_NORMS))
_GRANITE_MOE = _plan(_under("self_attn", _QKVO), _under("block_sparse_moe", _EXPERTS))
_GLM_LIKE = _plan(_under("self_attn", _QKVO), _under("mlp", _FUSED_GATED))

PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "afmoe": _plan(
            _MOE,
            {"self_attn.gate_proj": Style.QUERY},
            _under("mlp", _GATED),
            _under("mlp.shared_experts", _GATED),
        ),
        "bloom": _neox_like("self_attention"),
        "cohere": _COHERE_LIKE,
        "exaone_moe": _plan(_MOE, _under("mlp", _GATED), _under("mlp.shared_experts", _GATED)),
        "falcon": _neox_like("self_attention"),
        "flex_olmo": _OLMOE_LIKE,
        "glm": _GLM_LIKE,
        "glm4": _GLM_LIKE,
        "gpt2": _plan({"attn.c_attn": Style.QKV_BLOCKS, "attn.c_proj": Style.OUTPUT}, _GPT2_MLP),
        "gpt_bigcode": _plan({"attn.c_attn": Style.QKV_BY_GROUP, "attn.c_proj": Style.OUTPUT}, _GPT2_MLP),
        "gpt_neox": _neox_like("attention"),
        "gpt_oss": _plan(_MOE, {"self_attn.sinks": Style.QUERY_HEAD_SCALARS}),
        "gptj": _plan(_under("attn", _QKV_OUT), {"mlp.fc_in": Style.COLUMN, "mlp.fc_out": Style.ROW}),
        "granitemoe": _GRANITE_MOE,
        "granitemoeshared": _plan(
            _GRANITE_MOE, {"shared_mlp.input_linear": Style.GATE_UP, "shared_mlp.output_linear": Style.ROW}
        ),
        "hunyuan_v1_dense": _LLAMA_LIKE,
        "hunyuan_v1_moe": _plan(_MOE, _under("mlp.shared_mlp", _GATED)),
        "minimax_m2": _OLMOE_LIKE,
        "olmo2": _OLMO2_LIKE,
        "olmo3": _OLMO2_LIKE,
        "olmoe": _OLMOE_LIKE,
        "opt": _plan(_under("self_attn", _QKV_OUT), {"fc1": Style.COLUMN, "fc2": Style.ROW}),
        "persimmon": _neox_like("self_attn"),
        "phi3": _plan(
            {"self_attn.qkv_proj": Style.QKV_BLOCKS, "self_attn.o_proj": Style.OUTPUT},
            _under("mlp", _FUSED_GATED),
        ),
        "phimoe": _MOE,
        "qwen2_moe": _plan(_MOE, _under("mlp", _GATED), _under("mlp.shared_expert", _GATED)),
        "solar_open": _plan(_MOE, _under("mlp.shared_experts", _GATED)),
        "stablelm": _plan(
            _LLAMA_LIKE,
            {
                "self_attn.q_layernorm": Style.QUERY_HEAD_NORM,
                "self_attn.k_layernorm": Style.KEY_HEAD_NORM,
            },
        ),
    }
)
"""By `model_type`, the plans that transformers lacks or that gather what need not be gathered."""

WINDOW_IN_MASK = frozenset({"phimoe"})
"""Architectures whose attention learns of its sliding window from the mask alone, which is not built here."""

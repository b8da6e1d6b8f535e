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

from services.executor.model.catalogue import served_as
from shared.errors import ModelLoadError


class Style(Enum):
    """What of a module one rank holds."""

    COLUMN = auto()
    """A span of a linear layer's outputs."""
    ROW = auto()
    """A span of a linear layer's inputs; the outputs are summed over the ranks."""
    ROW_OF_WHOLE = auto()
    """As ROW, where what it is given is whole on every rank."""
    GATE_UP = auto()
    """The same span of two projections whose outputs stand one after the other: [gate | up]."""
    QUERY = auto()
    """The outputs of this rank's query heads; of a gate there may be one each."""
    GATED_QUERY = auto()
    """As QUERY, with the gate of each head's output behind its query."""
    LATENT = auto()
    """What makes keys and values of a latent (`latent.py`): the outputs of this rank's query heads."""
    KEY_VALUE = auto()
    """The outputs of this rank's KV heads."""
    OUTPUT = auto()
    """The inputs from this rank's query heads; the outputs are summed over the ranks."""
    KEYS_VALUES = auto()
    """Two projections whose outputs stand one after the other: [all k | all v]."""
    QKV_BLOCKS = auto()
    """Three projections whose outputs stand one after the other: [all q | all k | all v]."""
    QKV_BY_GROUP = auto()
    """The query heads of a KV head, its key, its value, then the next KV head's: [q0 q1 k0 v0 | q2 ...].

    With as many KV heads as query heads: [q0 k0 v0 | q1 k1 v1 | ...]; with one: [all q | k | v].
    """
    QVK_BY_FOURTH = auto()
    """The first fourth of the heads: [its q | its v | its k], then the second's. A rank holds [q | k | v]."""
    QUERY_PAIRS = auto()
    """The outputs of this rank's query heads, where head i and head i + n/2, of n, make one."""
    KEY_VALUE_PAIRS = auto()
    QUERY_ADAPTER = auto()
    """The second factor of what is added to queries: the outputs of this rank's query heads."""
    KEY_VALUE_ADAPTER = auto()
    KEY_VALUE_INPUT = auto()
    """The inputs from this rank's KV heads; the outputs are summed over the ranks."""
    QUERY_WIDE_NORM = auto()
    """An RMS norm over the values of all query heads at once: the ranks sum their squares."""
    KEY_WIDE_NORM = auto()
    INNER_WIDE_NORM = auto()
    """An RMS norm over the outputs of a column layer: the ranks sum their squares."""
    QUERY_HEAD_NORM = auto()
    """A norm within each query head, with other weights for each head."""
    KEY_HEAD_NORM = auto()
    QUERY_HEAD_SCALARS = auto()
    """One number for each query head (attention sinks)."""
    KEY_HEAD_SCALARS = auto()
    EXPERTS = auto()
    """All experts on every rank, a span of the inner width of each; the outputs are summed over the ranks."""
    EXPERT_STACKS = auto()
    """JetMoe's experts: a span of the inner width of each, or the KV heads of experts that make queries."""
    WHOLE = auto()
    """All of it on every rank."""
    WHOLE_LINEAR = auto()
    """The same, of a linear layer whose weight may be quantized as those that are split are."""


Plan = Mapping[str, Style]


def plan_for(config: Any) -> Plan:
    """The plan of the architecture of this transformers text configuration.

    Raises `ModelLoadError` when there is none, or when it names a style that is not known: a layer that is
    silently replicated computes nonsense as soon as its neighbour is split.
    """
    own = PLANS.get(served_as(config.model_type))
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
_W123: Plan = {"w1": Style.COLUMN, "w3": Style.COLUMN, "w2": Style.ROW}
_EXPERTS: Plan = {"experts": Style.EXPERTS}
_NEOX_MLP = {"mlp.dense_h_to_4h": Style.COLUMN, "mlp.dense_4h_to_h": Style.ROW}
_GPTJ_MLP = {"mlp.fc_in": Style.COLUMN, "mlp.fc_out": Style.ROW}
_GPT2_MLP = {"mlp.c_fc": Style.COLUMN, "mlp.c_proj": Style.ROW}


def _neox_like(attention: str) -> Plan:
    fused = {"query_key_value": Style.QKV_BY_GROUP, "dense": Style.OUTPUT}
    return _plan(_under(attention, fused), _NEOX_MLP)


_LLAMA_LIKE = _plan(_under("self_attn", _QKVO), _under("mlp", _GATED))
_GPT2_LIKE = _plan({"attn.c_attn": Style.QKV_BLOCKS, "attn.c_proj": Style.OUTPUT}, _GPT2_MLP)
_OPT_LIKE = _plan(_under("self_attn", _QKV_OUT), {"fc1": Style.COLUMN, "fc2": Style.ROW})
_OLMO2_LIKE = _plan(_LLAMA_LIKE, _under("self_attn", _WIDE_NORMS))
_COHERE_LIKE = _plan(_LLAMA_LIKE, _under("self_attn", _HEAD_NORMS))
_MOE = _plan(_under("self_attn", _QKVO), _under("mlp", _EXPERTS))
_OLMOE_LIKE = _plan(_MOE, _under("self_attn", _WIDE_NORMS))
_GRANITE_MOE = _plan(_under("self_attn", _QKVO), _under("block_sparse_moe", _EXPERTS))
_GRANITE_MOE_SHARED = _plan(
    _GRANITE_MOE, {"shared_mlp.input_linear": Style.GATE_UP, "shared_mlp.output_linear": Style.ROW}
)
_SINKS: Plan = {"self_attn.sinks": Style.QUERY_HEAD_SCALARS}
_HYBRID = _plan(_under("self_attn", _QKVO), _under("feed_forward", _GATED))
_GATED_ATTENTION: Plan = {**_QKVO, "q_proj": Style.GATED_QUERY}
_QWEN3_5_MOE = _plan(_MOE, _under("self_attn", _GATED_ATTENTION), _under("mlp.shared_expert", _GATED))
_GLM_LIKE = _plan(_under("self_attn", _QKVO), _under("mlp", _FUSED_GATED))

_LATENT: Plan = {
    "q_b_proj": Style.QUERY,
    "kv_b_proj": Style.LATENT,
    "o_proj": Style.OUTPUT,
    # What comes before heads: of all of them, and a norm spans it.
    "q_a_proj": Style.WHOLE_LINEAR,
    "q_a_layernorm": Style.WHOLE,
    "kv_a_proj_with_mqa": Style.WHOLE_LINEAR,
    "kv_a_layernorm": Style.WHOLE,
}
_WHOLE_QUERIES: Plan = {"self_attn.q_proj": Style.QUERY}
"""Of those that make queries in one product, too."""
_LATENT_DENSE = _plan(_under("self_attn", _LATENT), _under("mlp", _GATED))
_LATENT_MOE = _plan(_LATENT_DENSE, _under("mlp", _EXPERTS), _under("mlp.shared_experts", _GATED))

_INDEXED = _plan(_LATENT_MOE, {"self_attn.indexer.*": Style.WHOLE})

PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "afmoe": _plan(
            _MOE,
            {"self_attn.gate_proj": Style.QUERY},
            _under("mlp", _GATED),
            _under("mlp.shared_experts", _GATED),
        ),
        "aria_text": _plan(_MOE, _under("mlp.shared_experts", _GATED)),
        "axk1": _LATENT_MOE,
        "bailing_hybrid": {
            **{name: style for name, style in _LATENT_MOE.items() if ".q_" not in name},
            **_WHOLE_QUERIES,
            "self_attn.g_proj": Style.QUERY,
        },
        "axk2": _plan(
            {name: style for name, style in _INDEXED.items() if name != "self_attn.q_b_proj"},
            {"self_attn.q_gate_proj": Style.GATED_QUERY},
        ),
        "bamba": _HYBRID,
        "beam": _plan(
            _MOE,
            {"self_attn.gate_proj": Style.QUERY, "self_attn.gate_bias": Style.QUERY_HEAD_SCALARS},
            _under("mlp", _GATED),
        ),
        "biogpt": _OPT_LIKE,
        "bitnet": _plan(
            _LLAMA_LIKE,
            {"self_attn.attn_sub_norm": Style.QUERY_WIDE_NORM, "mlp.ffn_sub_norm": Style.INNER_WIDE_NORM},
        ),
        "bloom": _neox_like("self_attention"),
        "cohere": _COHERE_LIKE,
        "codegen": _plan({"attn.qkv_proj": Style.QVK_BY_FOURTH, "attn.out_proj": Style.OUTPUT}, _GPTJ_MLP),
        "cohere2_moe": _plan(_MOE, _under("mlp", _GATED), _under("mlp.shared_experts", _GATED)),
        "ctrl": _plan(
            _under(
                "multi_head_attention",
                {"Wq": Style.QUERY, "Wk": Style.KEY_VALUE, "Wv": Style.KEY_VALUE, "dense": Style.OUTPUT},
            ),
            {"ffn.0": Style.COLUMN, "ffn.2": Style.ROW},
        ),
        "dbrx": _plan(
            {"norm_attn_norm.attn.Wqkv": Style.QKV_BLOCKS, "norm_attn_norm.attn.out_proj": Style.OUTPUT},
            _under("ffn", _EXPERTS),
        ),
        "deepseek_v2": _plan(_LATENT_MOE, _WHOLE_QUERIES),
        "deepseek_v3": _plan(_LATENT_MOE, _WHOLE_QUERIES),
        "dots3_note_text": _plan(
            _INDEXED, {"self_attn.g_proj": Style.QUERY, "self_attn.k_rope_only_layernorm": Style.WHOLE}
        ),
        "emu3": _LLAMA_LIKE,
        "deepseek_v32": _INDEXED,
        "deepseek_v4": _plan(_under("mlp", _EXPERTS), _under("mlp.shared_experts", _GATED)),
        "diffllama": _plan(
            _LLAMA_LIKE,
            {
                "self_attn.q_proj": Style.QUERY_PAIRS,
                "self_attn.k_proj": Style.KEY_VALUE_PAIRS,
                "self_attn.v_proj": Style.KEY_VALUE_PAIRS,
            },
        ),
        "doge": _plan(
            _LLAMA_LIKE, {"self_attn.A": Style.KEY_HEAD_SCALARS, "self_attn.dt_proj": Style.KEY_VALUE_INPUT}
        ),
        "exaone_moe": _plan(_MOE, _under("mlp", _GATED), _under("mlp.shared_experts", _GATED)),
        "falcon": _neox_like("self_attention"),
        "falcon_mamba": {},
        "falcon_h1": _HYBRID,
        "flex_olmo": _OLMOE_LIKE,
        "flint": _plan(_MOE, _SINKS, _under("mlp", _GATED), _under("mlp.shared_expert", _GATED)),
        "gemma4_text": _plan(
            _LLAMA_LIKE,
            _EXPERTS,
            _under("self_attn", {"q_norm": Style.WHOLE, "k_norm": Style.WHOLE}),
            {"per_layer_input_gate": Style.WHOLE_LINEAR, "per_layer_projection": Style.WHOLE_LINEAR},
        ),
        "glm": _GLM_LIKE,
        "glm4": _GLM_LIKE,
        "glm4_moe_lite": _plan(_LATENT_MOE, _WHOLE_QUERIES),
        "glm_moe_dsa": _INDEXED,
        "gpt2": _GPT2_LIKE,
        "gpt_bigcode": _plan({"attn.c_attn": Style.QKV_BY_GROUP, "attn.c_proj": Style.OUTPUT}, _GPT2_MLP),
        "gpt_neo": _plan(_under("attn.attention", _QKV_OUT), _GPT2_MLP),
        "gpt_neox": _neox_like("attention"),
        "gpt_neox_japanese": _neox_like("attention"),
        "gpt_oss": _plan(_MOE, _SINKS),
        "gptj": _plan(_under("attn", _QKV_OUT), _GPTJ_MLP),
        "granite_swa": _plan(_LLAMA_LIKE, _SINKS),
        "granitemoe": _GRANITE_MOE,
        "granitemoe_swa": _plan(_GRANITE_MOE_SHARED, _SINKS),
        "granitemoehybrid": _GRANITE_MOE_SHARED,
        "granitemoeshared": _GRANITE_MOE_SHARED,
        "hunyuan_v1_dense": _LLAMA_LIKE,
        "hunyuan_v1_moe": _plan(_MOE, _under("mlp.shared_mlp", _GATED)),
        "hy_v4": _plan(_INDEXED, {"self_attn.gate_proj": Style.QUERY}, _SINKS),
        "jamba": _plan(
            _under("self_attn", _QKVO), _under("feed_forward", _GATED), _under("feed_forward", _EXPERTS)
        ),
        "jetmoe": {
            "self_attention.kv_proj": Style.KEYS_VALUES,
            "self_attention.experts": Style.EXPERT_STACKS,
            "self_attention.experts.router.layer": Style.WHOLE,
            "mlp": Style.EXPERT_STACKS,
        },
        "laguna": _plan(
            _MOE,
            {"self_attn.g_proj": Style.QUERY},
            _under("mlp", _GATED),
            _under("mlp.shared_experts", _GATED),
        ),
        "longcat_flash": _plan(
            _under("self_attn.*", _LATENT), _under("mlps.*", _GATED), _under("mlp", _EXPERTS)
        ),
        "mamba": {},
        "mamba2": {},
        "mimo_v2_flash": _plan(_MOE, _SINKS, _under("mlp", _GATED)),
        "minicpm3": _plan(_LATENT_DENSE, _WHOLE_QUERIES),
        "kimi_linear": _plan(_LATENT_MOE, _WHOLE_QUERIES),
        "lfm2": _plan(_under("self_attn", _QKV_OUT), _under("feed_forward", _W123)),
        "lfm2_moe": _plan(
            _under("self_attn", _QKV_OUT), _under("feed_forward", _W123), _under("feed_forward", _EXPERTS)
        ),
        "lfm3": _plan(_under("self_attn", {**_QKVO, "g_proj": Style.QUERY}), _under("feed_forward", _W123)),
        "minimax_m2": _OLMOE_LIKE,
        "minimax_m3_vl_text": _plan(
            _MOE,
            {"self_attn.indexer.*": Style.WHOLE},
            _under("mlp", _FUSED_GATED),
            _under("mlp.shared_experts", _FUSED_GATED),
        ),
        "mistral4": _plan(_LATENT_MOE, _WHOLE_QUERIES),
        "modernbert-decoder": _plan(
            _under("attn", {**_QKV, "Wo": Style.OUTPUT}), {"mlp.Wi": Style.GATE_UP, "mlp.Wo": Style.ROW}
        ),
        "mpt": {
            "attn.Wqkv": Style.QKV_BLOCKS,
            "attn.out_proj": Style.OUTPUT,
            "ffn.up_proj": Style.COLUMN,
            "ffn.down_proj": Style.ROW,
        },
        "nemotron_h": _plan(
            _under("mixer", {**_QKVO, "up_proj": Style.COLUMN, "down_proj": Style.ROW, **_EXPERTS}),
            _under("mixer.shared_experts", {"up_proj": Style.COLUMN, "down_proj": Style.ROW}),
        ),
        "olmo2": _OLMO2_LIKE,
        "olmo3": _OLMO2_LIKE,
        "olmo_hybrid": _OLMO2_LIKE,
        "olmoe": _OLMOE_LIKE,
        "openai-gpt": _GPT2_LIKE,
        "opt": _OPT_LIKE,
        "persimmon": _neox_like("self_attn"),
        "phi3": _plan(
            {"self_attn.qkv_proj": Style.QKV_BLOCKS, "self_attn.o_proj": Style.OUTPUT},
            _under("mlp", _FUSED_GATED),
        ),
        "phimoe": _MOE,
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "qwen3_5_text": _plan(_under("self_attn", _GATED_ATTENTION), _under("mlp", _GATED)),
        "qwen3_next": _plan(_QWEN3_5_MOE, _under("mlp", _GATED)),
        "qwen4_exp_text": _plan(_QWEN3_5_MOE, {"self_attn.indexer.*": Style.WHOLE}),
        "qwen2_moe": _plan(_MOE, _under("mlp", _GATED), _under("mlp.shared_expert", _GATED)),
        "recurrent_gemma": _plan(_under("temporal_block", _QKVO), _under("mlp_block", _GATED)),
        "rwkv": {},
        "solar_open": _plan(_MOE, _under("mlp.shared_experts", _GATED)),
        "stablelm": _plan(
            _LLAMA_LIKE,
            {
                "self_attn.q_layernorm": Style.QUERY_HEAD_NORM,
                "self_attn.k_layernorm": Style.KEY_HEAD_NORM,
            },
        ),
        "xglm": _OPT_LIKE,
        "xlstm": _under(
            "ffn", {"proj_up_gate": Style.COLUMN, "proj_up": Style.COLUMN, "proj_down": Style.ROW}
        ),
        "zamba": _plan(
            _under("shared_transf.self_attn", _QKVO),
            _under("shared_transf.feed_forward", _GATED),
            {"linear": Style.ROW_OF_WHOLE},
        ),
        "zamba2": _plan(
            _under("shared_transformer.self_attn", _QKVO),
            _under(
                "shared_transformer.self_attn",
                {
                    "linear_*_adapter_list.*.0": Style.WHOLE,
                    "linear_q_adapter_list.*.1": Style.QUERY_ADAPTER,
                    "linear_k_adapter_list.*.1": Style.KEY_VALUE_ADAPTER,
                    "linear_v_adapter_list.*.1": Style.KEY_VALUE_ADAPTER,
                },
            ),
            _under("shared_transformer.feed_forward", _FUSED_GATED),
            {
                "shared_transformer.feed_forward.gate_up_proj_adapter_list.*.1": Style.GATE_UP,
                "linear": Style.ROW_OF_WHOLE,
            },
        ),
        "zaya": _plan(
            {"self_attn.o_proj": Style.OUTPUT, "self_attn.qk_norm.temp": Style.KEY_HEAD_SCALARS},
            _under("mlp", _EXPERTS),
        ),
        "youtu": _plan(_LATENT_DENSE, _WHOLE_QUERIES),
    }
)
"""By `model_type`, the plans that transformers lacks or that gather what need not be gathered."""

WINDOW_IN_MASK = frozenset({"doge", "phimoe"})
"""Architectures whose attention learns of its sliding window from the mask alone, which is not built here."""

"""Tiny configurations of every architecture that is served: uneven heads, widths and vocabularies.

Each turns on what sets its architecture apart; for the families of the fast decoders that stands in `tiny.py`. Where an
architecture comes in several forms, each form has a configuration of its own, `model_type/form`.
"""

from typing import Any

from tests.unit.executor.model.tiny import VARIANTS, WINDOWS

GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
"""Two query heads for each KV head; two ranks share a KV head."""
ONE_KV_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12}
"""Fewer KV heads than ranks: each rank holds the one."""
FIVE_HEADS = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12}
EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SHARED_EXPERTS = {
    **EXPERTS,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}

LONGROPE = {
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 40,
    },
}
"""For heads of 12; frequencies change beyond 40 tokens, and no sequence of the tests is longer."""

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    **GROUPED,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_GPT2 = {"hidden_size": 60, "n_head": 5}
_FALCON = {"num_attention_heads": 6}

OWN_NAMES = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gptj"})
"""Architectures whose configuration does not know the common names of head counts."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1, **WINDOWS},
    "apertus": {},
    "arcee": {},
    "bloom": _GPT2,
    "cohere": {"use_qk_norm": True, "logit_scale": 0.7},
    "cohere2": {**WINDOWS, "logit_scale": 0.7},
    "cwm": WINDOWS,
    "dots1": {**SHARED_EXPERTS, **WINDOWS},
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": WINDOWS,
    "exaone_moe": {**EXPERTS, **WINDOWS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "falcon/new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": False},
    "falcon/multi_query": {**_FALCON, "multi_query": True, "bias": True},
    "falcon/alibi": {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "flex_olmo": EXPERTS,
    "gemma": ONE_KV_HEAD,
    "gemma2": {**VARIANTS["gemma2"], "query_pre_attn_scalar": 9},
    "gemma3_text": {**VARIANTS["gemma3_text"], "query_pre_attn_scalar": 9},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {**SHARED_EXPERTS, "use_qk_norm": True, "attention_bias": True},
    "gpt2": {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {**_GPT2, "multi_query": True},
    "gpt_bigcode/heads": {**_GPT2, "multi_query": False},
    "gpt_neox": {**FIVE_HEADS, "tie_word_embeddings": False},
    "gpt_neox/sequential": {**FIVE_HEADS, "use_parallel_residual": False, "attention_bias": False},
    "gpt_oss": {**EXPERTS, **WINDOWS},
    "gpt_oss/narrow": {**EXPERTS, **WINDOWS, "intermediate_size": 44},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "granite": VARIANTS["granite"],
    "granitemoe": {**EXPERTS, "attention_multiplier": 0.3},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 44},
    "helium": {},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    },
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "jais2": {},
    "llama": FIVE_HEADS,
    "llama/one_kv_head": {
        **ONE_KV_HEAD,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama/llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama/dynamic_rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "minimax_m2": {**EXPERTS, "rotary_dim": 4},
    "ministral": VARIANTS["ministral"],
    "ministral3": {"sliding_window": 7},
    "mistral": VARIANTS["mistral"],
    "mixtral": {**EXPERTS, "sliding_window": 7},
    "nanochat": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo": {"clip_qkv": 0.4},
    "olmo2": ONE_KV_HEAD,
    "olmo3": {**WINDOWS, "tie_word_embeddings": False},
    "olmoe": {**EXPERTS, **ONE_KV_HEAD},
    "opt": {**FIVE_HEADS, "ffn_dim": 88, "word_embed_proj_dim": 60},
    "opt/projected": {**FIVE_HEADS, "ffn_dim": 88, "word_embed_proj_dim": 36, "do_layer_norm_before": False},
    "persimmon": {**FIVE_HEADS, "partial_rotary_factor": 0.5},
    "phi": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"sliding_window": 7},
    "phi3/longrope": {**ONE_KV_HEAD, **LONGROPE},
    "phimoe": {**EXPERTS, "sliding_window": 7, "lm_head_bias": True, "attention_bias": True},
    "phimoe/longrope": {**EXPERTS, **ONE_KV_HEAD, **LONGROPE},
    "qwen2": VARIANTS["qwen2"],
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 44, "mlp_only_layers": [0]},
    "qwen3": {**VARIANTS["qwen3"], **ONE_KV_HEAD},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0]},
    "qwen3_moe/narrow": {**EXPERTS, "moe_intermediate_size": 44},
    "seed_oss": VARIANTS["seed_oss"],
    "smollm3": VARIANTS["smollm3"],
    "solar_open": SHARED_EXPERTS,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 7, "use_bias": True},
    "vaultgemma": {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}


def settings_of(name: str) -> dict[str, Any]:
    """The whole configuration of an entry of `ARCHITECTURES`."""
    base = BASE
    if name.partition("/")[0] in OWN_NAMES:
        base = {key: value for key, value in BASE.items() if key not in GROUPED}
    return {**base, **ARCHITECTURES[name]}

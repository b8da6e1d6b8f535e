"""Tiny configurations of every architecture that is served: uneven heads, widths and vocabularies.

Each turns on what sets its architecture apart; for the families of the fast decoders that stands in `tiny.py`. Where an
architecture comes in several forms, each form has a configuration of its own, `model_type/form`.
"""

from typing import Any

from tests.unit.executor.model.common_settings import (
    BASE,
    EXPERTS,
    FIVE_HEADS,
    GRANITE_SCALES,
    GROUPED,
    LATENT,
    NARROW_LATENT,
    ONE_KV_HEAD,
    SHARED_EXPERTS,
    VISION,
)
from tests.unit.executor.model.recurrent_architectures import RECURRENT
from tests.unit.executor.model.tiny import VARIANTS, WINDOWS, YARN

# Texts are longer than the tokens that are chosen. With so many heads no scores tie (at 0, where all are
# negative): which of those that tie is chosen transformers leaves to its operator.
INDEXED = {
    **SHARED_EXPERTS,
    **LATENT,
    "index_topk": 9,
    "index_head_dim": 12,
    "index_n_heads": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
}
# For heads of 12; frequencies change beyond 40 tokens, and no sequence of the tests is longer.
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

_GPT2 = {"hidden_size": 60, "n_head": 5}
COMPASS: dict[str, Any] = {
    **WINDOWS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]},
        "full_attention": None,
    },
    "logit_scale": 0.7,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}}
# Of vision models.
_PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
}
# Its blocks end where those of the KV cache do not; of a text some are not attended to.
_MINIMAX_M3 = {
    **EXPERTS,
    "layer_types": ["minimax_m3_sparse", "full_attention"],
    "index_n_heads": 3,
    "index_head_dim": 12,
    "index_block_size": 6,
    "index_topk_blocks": 2,
    "dense_intermediate_size": 88,
    "intermediate_size": 40,
    "shared_intermediate_size": 44,
    "mlp_layer_types": ["dense", "sparse"],
    "rotary_dim": 4,
    "swiglu_limit": 1.0,
}
_FALCON = {"num_attention_heads": 6}

_SHARED_KEYS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 6,
    "final_logit_softcapping": 4.0,
}
_GEMMA3N = {
    **_SHARED_KEYS,
    "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0, 0.0, 0.0],
    "laurel_rank": 4,
    "intermediate_size": [88] * 6,
}
_GEMMA4 = {**_SHARED_KEYS, "global_head_dim": 16}


_LLAMA4 = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 88,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "floor_scale": 5,
}

_DOTS3 = {
    **INDEXED,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "head_dim": 12,
    "sliding_window": 7,
    "shared_experts_intermediate_size": 44,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 3,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 14,
    "swa_qk_nope_head_dim": 8,
    "swa_qk_rope_head_dim": 6,
    "swa_v_head_dim": 10,
}

# Architectures whose configuration does not know the common names of head counts.
OWN_NAMES = frozenset(
    {
        "bloom",
        "codegen",
        "gpt_neo",
        "ctrl",
        "dbrx",
        "falcon",
        "falcon_mamba",
        "gpt-sw3",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "mamba",
        "mpt",
        "openai-gpt",
        "rwkv",
        "xglm",
        "xlstm",
    }
)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **RECURRENT,
    "afmoe": {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1, **WINDOWS},
    "apertus": {},
    "arcee": {},
    "aria": {
        "text_config": {**EXPERTS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
        "vision_config": VISION,
        "projector_patch_to_query_dict": {16: 4},
    },
    "aria_text": {**EXPERTS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0},
    "axk1": {**SHARED_EXPERTS, **NARROW_LATENT, "attention_bias": True},
    "axk2": {**INDEXED, "gated_norm_rank": 6, "attention_bias": True},
    "beam": {
        **EXPERTS,
        **WINDOWS,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 2,
        "topk_group": 1,
        "final_logit_softcapping": 3.0,
    },
    "biogpt": FIVE_HEADS,
    "bitnet": {},
    "bloom": _GPT2,
    "codegen": {"hidden_size": 64, "n_head": 8, "rotary_dim": 4, "n_inner": 88, "n_ctx": 128},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.7},
    "cohere2": {**WINDOWS, "logit_scale": 0.7},
    "cohere2_moe": {
        **EXPERTS,
        **WINDOWS,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 44,
        "logit_scale": 0.7,
    },
    "cohere_compass": {
        "text_config": COMPASS,
        "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    },
    "cohere_compass_text": COMPASS,
    "ctrl": {**_GPT2, "dff": 88},
    "cwm": WINDOWS,
    "dbrx": {
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 3, "clip_qkv": 0.4, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2},
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {**SHARED_EXPERTS, **LATENT, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    "deepseek_v2/lite": {**SHARED_EXPERTS, **NARROW_LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.7},
    "deepseek_v3": {**SHARED_EXPERTS, **LATENT, "attention_bias": True, "rope_parameters": YARN},
    "deepseek_v3/whole_queries": {**SHARED_EXPERTS, **NARROW_LATENT, "q_lora_rank": None, "rope_interleave": False},
    "deepseek_v32": {**INDEXED, "rope_parameters": YARN},
    "deepseek_v32/dense": {**INDEXED, **NARROW_LATENT, "index_topk": 64},
    "diffllama": {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "attention_bias": True},
    "diffllama/one_pair": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6},
    "doge": {"attention_bias": True, "mlp_bias": True, "sliding_window": 7, "keep_window_size": 64},
    "doge/one_kv_head": {**ONE_KV_HEAD, "keep_window_size": 64},
    "dots1": {**SHARED_EXPERTS, **WINDOWS},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {**VISION, "mlp_layer_types": ["dense"], "adapter_in_dim": 16, "adapter_out_dim": 40},
        "audio_config": {
            **VISION,
            "feature_size": 8,
            "downsample_hidden_size": 8,
            "adapter_input_size": 16,
            "adapter_out_dim": 40,
        },
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "text_config": {"tie_word_embeddings": False},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "attn_resolutions": [1], "hidden_size": 8},
        "vocabulary_map": {"<image>": 7},
    },
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": WINDOWS,
    "exaone_moe": {**EXPERTS, **WINDOWS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "exaone4_5": {
        "text_config": {"model_type": "exaone4", **WINDOWS},
        "vision_config": {**_PATCHES, "num_key_value_heads": 1},
    },
    "falcon/new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": False},
    "falcon/multi_query": {**_FALCON, "multi_query": True, "bias": True},
    "falcon/alibi": {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "flex_olmo": EXPERTS,
    "flint": {**EXPERTS, **WINDOWS, "mlp_only_layers": [0], "shared_expert_intermediate_size": 44},
    "gemma": ONE_KV_HEAD,
    "gemma2": {**VARIANTS["gemma2"], "query_pre_attn_scalar": 9},
    "gemma3": {
        "text_config": {**VARIANTS["gemma3_text"], "query_pre_attn_scalar": 9},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma3n": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4, "vision_config": VISION, "audio_config": None},
    "gemma4_unified": {"text_config": {**_GEMMA4, "num_kv_shared_layers": 0}, "vision_config": VISION},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_text/mixture": {
        **_GEMMA4,
        **EXPERTS,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_unified_text": {**_GEMMA4, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
    "gemma3_text": {**VARIANTS["gemma3_text"], "query_pre_attn_scalar": 9},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {**SHARED_EXPERTS, "use_qk_norm": True, "attention_bias": True},
    "gpt-sw3": _GPT2,
    "glm4_moe_lite": {**SHARED_EXPERTS, **LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm4_moe_lite/whole_queries": {**SHARED_EXPERTS, **NARROW_LATENT, "q_lora_rank": None},
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    "gpt2": {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {**_GPT2, "multi_query": True},
    "gpt_bigcode/heads": {**_GPT2, "multi_query": False},
    "gpt_neo": {**_GPT2, "num_heads": 5, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    "gpt_neox": {**FIVE_HEADS, "tie_word_embeddings": False},
    "gpt_neox/sequential": {**FIVE_HEADS, "use_parallel_residual": False, "attention_bias": False},
    "gpt_neox_japanese": {**FIVE_HEADS, "intermediate_multiple_size": 2, "rotary_pct": 0.5},
    "gpt_oss": {**EXPERTS, **WINDOWS},
    "gpt_oss/narrow": {**EXPERTS, **WINDOWS, "intermediate_size": 44},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "granite": VARIANTS["granite"],
    "granite_swa": {**WINDOWS, **GRANITE_SCALES, "layer_rope_theta": [1e4, 0]},
    "granitemoe": {**EXPERTS, "attention_multiplier": 0.3},
    "granitemoe_swa": {
        **EXPERTS,
        **WINDOWS,
        **GRANITE_SCALES,
        "layer_rope_theta": [1e4, 5e4],
        "shared_intermediate_size": 44,
    },
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 44},
    "helium": {},
    "hy_v3": {
        **EXPERTS,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "hy_v4": {
        **INDEXED,
        "indexer_types": ["full", "shared", "full"],
        "hc_mult": 3,
        "learnable_sink_init": 0.5,
        "swiglu_limit": 0.7,
    },
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "hyperclovax": {**VARIANTS["granite"], "hidden_size": 60, "head_dim": 12},
    "hyperclovax/no_post_norm": {
        "hidden_size": 60,
        "head_dim": 12,
        "use_post_norm": False,
        "attention_multiplier": 0.3,
    },
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "iquestcoder": ONE_KV_HEAD,
    "internvl": {
        "text_config": {"tie_word_embeddings": True},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "jais2": {},
    "jetmoe": {**EXPERTS, "kv_channels": 8, "head_dim": 8, "intermediate_size": 40},
    "jetmoe/one_kv_head": {
        **EXPERTS,
        "kv_channels": 12,
        "head_dim": 12,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 3,
    },
    "kimi_k25": {},
    "kolibri1": {**EXPERTS, **WINDOWS, "shared_expert_intermediate_size": 44},
    "laguna": {
        **EXPERTS,
        **WINDOWS,
        "gating": True,
        "shared_expert_intermediate_size": 44,
        "num_attention_heads_per_layer": [6, 9],
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 2.0,
        "attention_bias": True,
    },
    "laguna/per_element": {**EXPERTS, **WINDOWS, "gating": "per-element", "mlp_layer_types": ["sparse", "sparse"]},
    "llama": FIVE_HEADS,
    "llama/one_kv_head": {**ONE_KV_HEAD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
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
    "longcat_flash": {
        **EXPERTS,
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 88,
        "expert_ffn_hidden_size": 40,
        "moe_topk": 3,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "routed_scaling_factor": 1.7,
    },
    "mellum": {**EXPERTS, **WINDOWS, "mlp_layer_types": ["dense", "sparse"]},
    "mimo_v2_flash": {
        **SHARED_EXPERTS,
        **WINDOWS,
        "head_dim": 12,
        "v_head_dim": 8,
        "attention_bias": True,
        "attention_value_scale": 0.7,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    },
    "mimo_v2_flash/one_kv_head": {
        **SHARED_EXPERTS,
        **WINDOWS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 8,
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "llama4": {"text_config": _LLAMA4, "vision_config": VISION},
    "llama4_text": _LLAMA4,
    "minicpm3/whole_queries": {**NARROW_LATENT, "q_lora_rank": None},
    "minicpm3": {**LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 20},
    "minimax_m2": {**EXPERTS, "rotary_dim": 4},
    "minimax_m3_vl": {"text_config": _MINIMAX_M3, "vision_config": {**VISION, "patch_size": 4}},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "ministral": VARIANTS["ministral"],
    "ministral3": {"sliding_window": 7},
    "mistral": VARIANTS["mistral"],
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": 7},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "mistral4": {
        **SHARED_EXPERTS,
        **LATENT,
        "head_dim": 12,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.34},
    },
    "mistral4/whole_queries": {**SHARED_EXPERTS, **NARROW_LATENT, "head_dim": 12, "q_lora_rank": None},
    "mixtral": {**EXPERTS, "sliding_window": 7},
    "modernbert-decoder": {
        **FIVE_HEADS,
        **WINDOWS,
        "local_attention": 18,
        "attention_bias": True,
        "norm_bias": True,
        "classifier_bias": True,
    },
    "mpt": {
        "hidden_size": 60,
        "n_heads": 5,
        "max_seq_len": 128,
        "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.3},
    },
    "nanochat": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo": {"clip_qkv": 0.4},
    "olmo2": ONE_KV_HEAD,
    "olmo3": {**WINDOWS, "tie_word_embeddings": False},
    "olmoe": {**EXPERTS, **ONE_KV_HEAD},
    "openai-gpt": _GPT2,
    "opt": {**FIVE_HEADS, "ffn_dim": 88, "word_embed_proj_dim": 60},
    "opt/projected": {**FIVE_HEADS, "ffn_dim": 88, "word_embed_proj_dim": 36, "do_layer_norm_before": False},
    "persimmon": {**FIVE_HEADS, "partial_rotary_factor": 0.5},
    "phi": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"sliding_window": 7},
    "phi3/longrope": {**ONE_KV_HEAD, **LONGROPE},
    "phi4_multimodal": {
        **ONE_KV_HEAD,
        **LONGROPE,
        "vision_config": {**VISION, "crop_size": 16},
        "audio_config": {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_blocks": 2},
    },
    "phimoe": {**EXPERTS, "sliding_window": 7, "lm_head_bias": True, "attention_bias": True},
    "phimoe/longrope": {**EXPERTS, **ONE_KV_HEAD, **LONGROPE},
    "qwen2": VARIANTS["qwen2"],
    "qwen2_5_vl": {
        "text_config": {"tie_word_embeddings": False, **_MROPE},
        "vision_config": _PATCHES,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {"text_config": _MROPE, "vision_config": {**_PATCHES, "hidden_size": 48, "embed_dim": 16}},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 44, "mlp_only_layers": [0]},
    "qwen3": {**VARIANTS["qwen3"], **ONE_KV_HEAD},
    "qwen3_vl": {
        "text_config": {"attention_bias": True, **_MROPE},
        "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    },
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0]},
    "qwen3_moe/narrow": {**EXPERTS, "moe_intermediate_size": 44},
    "seed_oss": VARIANTS["seed_oss"],
    "smollm3": VARIANTS["smollm3"],
    "solar_open": SHARED_EXPERTS,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 7, "use_bias": True},
    "vaultgemma": {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "xglm": {"hidden_size": 60, "attention_heads": 5, "num_layers": 2, "ffn_dim": 88},
    "youtu": {**LATENT, "attention_bias": True},
    "youtu/halves": {**NARROW_LATENT, "q_lora_rank": None, "rope_interleave": False},
}


def settings_of(name: str) -> dict[str, Any]:
    """The whole configuration of an entry of `ARCHITECTURES`."""
    base = BASE
    if name.partition("/")[0] in OWN_NAMES:
        base = {key: value for key, value in BASE.items() if key not in GROUPED}
    own = ARCHITECTURES[name]
    if "text_config" in own:
        return {**own, "text_config": {**base, **own["text_config"]}}
    return {**base, **own}


# Of each kind of state an architecture.
KINDS = {
    "full": "qwen3",
    "sliding": "mistral",
    "chunked": "llama4_text",
    "latent": "deepseek_v3/whole_queries",
    "indexed": "deepseek_v32",
    "shared": "gemma3n_text",
    "recurrent": "qwen3_5_text",
    "hybrid": "zaya",
    "compressed": "deepseek_v4",
}

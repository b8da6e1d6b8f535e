"""Tiny configurations of architectures with recurrent state, as `architectures.py` has the others."""

from typing import Any

from tests.unit.executor.model.common_settings import (
    EXPERTS,
    FIVE_HEADS,
    GRANITE_SCALES,
    LATENT,
    NARROW_LATENT,
    ONE_KV_HEAD,
    SHARED_EXPERTS,
    VISION,
)

_QWEN3_5_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}

_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

_KIMI_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 5,
    "linear_head_dim": 8,
    "routed_scaling_factor": 1.5,
}

# Two ranks share a group of heads.
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}

# Norms of the gated outputs span the ranks.
_ONE_GROUP = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_conv": 3}

_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 12,
    "time_step_min": 0.6,
    "n_routed_experts": 6,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 44,
    "n_group": 2,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
}

_MAMBA2 = {"num_heads": 6, "head_dim": 16, "state_size": 10, "conv_kernel": 3, "time_step_limit": [0.3, 1.2]}

# Two blocks, called twice each; the second form has one.
_ZAMBA2 = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "adapter_rank": 5,
    "n_mamba_heads": 6,
    "mamba_ngroups": 3,
    "mamba_d_state": 10,
    "time_step_min": 0.6,
}

_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "conv_bias": True}

_XLSTM = {
    "hidden_size": 40,
    "num_heads": 5,
    "ffn_round_up_to_multiple_of": 8,
    "autocast_kernel_dtype": "float32",
    "tie_word_embeddings": False,
}

_QWEN4 = {
    **EXPERTS,
    **_DELTA_RULE,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "shared_expert_intermediate_size": 44,
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [3],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 10,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 2, 1],
        "partial_rotary_factor": 1.0,
    },
    "tie_word_embeddings": False,
}

# Lines of two tokens, two in a block, and of eight, one in two blocks; groups of heads that ranks share.
_DEEPSEEK_V4 = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 10,
    "index_n_heads": 16,
    "index_head_dim": 14,
    "index_topk": 5,
    "n_routed_experts": 6,
    "sliding_window": 7,
    "hc_mult": 3,
    "swiglu_limit": 0.7,
}


RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**SHARED_EXPERTS, **LATENT, **_KIMI_DELTA, "short_conv_kernel_size": 3},
    "bailing_hybrid/unbounded": {**SHARED_EXPERTS, **NARROW_LATENT, **_KIMI_DELTA, "kda_safe_gate": False},
    "bamba": {
        **{key: value for key, value in _MAMBA.items() if key != "layer_types"},
        "attn_layer_indices": [1],
        "mamba_proj_bias": True,
        "time_step_limit": [0.3, 1.2],
    },
    "bamba/one_group": {**_ONE_GROUP, "attn_layer_indices": [0], "mamba_conv_bias": False},
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v4/all_lines": {
        **_DEEPSEEK_V4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
        "index_topk": 64,
        "o_groups": 5,
        "mlp_layer_types": ["moe"] * 4,
        "num_experts_per_tok": 6,  # all: of few, rounding to bf16 would choose others
    },
    "falcon_mamba": {"hidden_size": 44, "state_size": 6, "time_step_rank": 5, "tie_word_embeddings": False},
    "falcon_h1": {
        **{key: value for key, value in _MAMBA.items() if key != "layer_types"},
        "mamba_d_ssm": 72,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.8],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [1.4, 0.9],
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
    },
    "falcon_h1/normed": {**_ONE_GROUP, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1/normed_before": {**_ONE_GROUP, "mamba_d_ssm": 40, "mamba_n_groups": 2, "mamba_rms_norm": True},
    "granitemoehybrid": {
        **EXPERTS,
        **GRANITE_SCALES,
        **_MAMBA,
        "embedding_multiplier": 2.0,
        "shared_intermediate_size": 44,
    },
    "granitemoehybrid/dense": {
        **GRANITE_SCALES,
        **_MAMBA,
        **_ONE_GROUP,
        "num_local_experts": 0,
        "shared_intermediate_size": 88,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid/attention": {
        **EXPERTS,
        "layer_types": ["full_attention"] * 2,
        "mamba_n_heads": 6,
        "shared_intermediate_size": 44,
    },
    "jamba": {
        **EXPERTS,
        "hidden_size": 40,
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
    },
    "kimi_linear": {**SHARED_EXPERTS, **LATENT, **_KIMI_DELTA},
    "kimi_linear/whole_queries": {**SHARED_EXPERTS, **NARROW_LATENT, **_KIMI_DELTA, "q_lora_rank": None},
    "lfm2": {**_CONVOLUTIONS, "block_multiple_of": 8},
    "lfm2_vl": {
        "text_config": {**_CONVOLUTIONS, "block_multiple_of": 8},
        "vision_config": {**VISION, "num_patches": 16},
    },
    "lfm2_moe": {**EXPERTS, **_CONVOLUTIONS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "lfm3": {
        **_CONVOLUTIONS,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
    "lfm3/ungated": {**_CONVOLUTIONS, "use_attention_gate": False, "use_sandwich_norm": False},
    "mamba": {"hidden_size": 44, "state_size": 6, "use_bias": True},
    "mamba/without_bias": {"hidden_size": 36, "expand": 3, "conv_kernel": 2, "use_conv_bias": False},
    "mamba2": {**_MAMBA2, "n_groups": 3, "use_bias": True},
    "mamba2/one_group": {**_MAMBA2, "n_groups": 1, "use_conv_bias": False, "residual_in_fp32": False},
    "minimax": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "block_size": 8,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.2,
        "full_attn_alpha_factor": 1.1,
        "mlp_beta_factor": 0.8,
    },
    "minimax/five_heads": {
        **EXPERTS,
        **FIVE_HEADS,
        "hidden_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h/latent": {
        **_NEMOTRON_H,
        "n_groups": 1,
        "mamba_num_heads": 5,
        "moe_latent_size": 24,
        "use_bias": True,
        "use_conv_bias": False,
    },
    "olmo_hybrid": {**_DELTA_RULE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "olmo_hybrid/unrotated": {**_DELTA_RULE, "rope_parameters": None, "linear_allow_neg_eigval": False},
    "qwen3_5": {"text_config": _DELTA_RULE, "vision_config": _QWEN3_5_VISION},
    "qwen3_5_moe": {
        "text_config": {**_DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 44},
        "vision_config": _QWEN3_5_VISION,
    },
    "qwen3_5_moe_text": {**_DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 44},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": {**_DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 44, "mlp_only_layers": [0]},
    "qwen3_next/one_key_head": {
        **_DELTA_RULE,
        **EXPERTS,
        **ONE_KV_HEAD,
        "shared_expert_intermediate_size": 44,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
    },
    "qwen4_exp": {"text_config": _QWEN4, "vision_config": _QWEN3_5_VISION},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp_text/long_blocks": {**_QWEN4, "ple_layer_ids": [], "indexer_compress_ratio": 8, "indexer_budget": 16},
    "recurrent_gemma": {"num_hidden_layers": 4, "lru_width": 54, "attention_window_size": 9},
    "recurrent_gemma/one_kv_head": {**FIVE_HEADS, "num_key_value_heads": 1, "attention_window_size": 9},
    "rwkv": {"hidden_size": 44, "num_hidden_layers": 3, "rescale_every": 1},
    "rwkv/other_widths": {"attention_hidden_size": 60, "rescale_every": 0},
    "xlstm": _XLSTM,
    "xlstm/biases": {**_XLSTM, "num_heads": 3, "hidden_size": 48, "use_bias": True},
    "zamba": {
        "hidden_size": 44,
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
    },
    "zamba2": {**_ZAMBA2, "use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True},
    "zamba2/one_group": {**_ZAMBA2, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1},
    "zaya": {
        **EXPERTS,
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 9,
        "router_hidden_size": 12,
        "cca_time0": 3,
        "lm_head_bias": True,
    },
}

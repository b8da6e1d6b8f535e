"""Settings that tiny configurations of several architectures share (`architectures.py`)."""

from typing import Any

# Two query heads for each KV head; two ranks share a KV head.
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}

# Fewer KV heads than ranks: each rank holds the one.
ONE_KV_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12}

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

# Five heads, and a latent twice as wide as they are: chunks of fewer than 32 rows attend to lines as they are.
LATENT = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "hidden_size": 40,
}

# So narrow that chunks of any length make keys and values of lines.
NARROW_LATENT = {**LATENT, "kv_lora_rank": 8}

GRANITE_SCALES = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0}

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}

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

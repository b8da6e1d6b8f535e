"""Small random models in the directory format of the real ones, and what transformers computes with them."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

BASE = {
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

WINDOWS: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
"""Layers of these types in turn."""

EXPERTS: dict[str, Any] = {
    "hidden_size": 96,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
"""Of each type those that it knows."""
GROUPED: dict[str, Any] = {
    **EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 10},
    "ministral": WINDOWS,
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "seed_oss": {"attention_bias": True},
    "phi3": {"partial_rotary_factor": 0.5},
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "dots1": {**GROUPED, "sliding_window": 9},
    "glm4_moe": {**GROUPED, "use_qk_norm": True, "attention_bias": True},
    "solar_open": GROUPED,
    "gemma": {},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    "gemma3_text": WINDOWS,
}
"""What sets each family of the fast decoders apart: uneven heads, biases, per-head norms, windows, layers without
rotary embeddings, half of them rotated, scaled logits and a bias on row-parallel layers, mixed windows, scaled and
capped scores."""


def settings_for(model_type: str, **changes: Any) -> dict[str, Any]:
    """The whole configuration of a small model."""
    settings = {**BASE, **VARIANTS.get(model_type, {}), **changes}
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = [kinds[at % len(kinds)] for at in range(settings["num_hidden_layers"])]
    return settings


def make_model(directory: Path, model_type: str, **changes: Any) -> Path:
    """Saves a random fp32 model whose weights are large enough for its logits to tell tokens apart."""
    config = CONFIG_MAPPING[model_type](**settings_for(model_type, **changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * spread if "norm" in name else 0.12 * spread)
    model.save_pretrained(str(directory))
    return directory


def reference_logits(directory: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' own logits for each whole sequence: float32 [tokens, vocab] each."""
    model = AutoModelForCausalLM.from_pretrained(
        str(directory), attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def build(name: str, settings: dict[str, Any]) -> Any:
    """A random fp32 model of the architecture `name` (`model_type` or `model_type/form`)."""
    config = CONFIG_MAPPING[name.partition("/")[0]](**settings)
    torch.manual_seed(0)
    # Falcon's eager attention adds its linear biases twice; its other one adds them once.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                spread = torch.randn(tensor.shape)
                tensor.copy_(1 + 0.1 * spread if "norm" in key or "ln_" in key else 0.12 * spread)
    return model.eval()


def logits_of(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits for each whole sequence: float32 [tokens, vocab] each."""
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]

"""Small random models in the directory format of the real ones, and what transformers computes with them."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from services.executor.families.registry import family_of

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

# Layers of these types in turn.
WINDOWS: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}

# Of each type those that it knows.
EXPERTS: dict[str, Any] = {
    "hidden_size": 96,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Of 32 values, of a model that is 96 wide: its type names no other width.
THREE_HEADS: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3}
GROUPED: dict[str, Any] = {
    **EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}

# Of few, rounding to bf16 would choose others; in models with recurrent state all later tokens would differ too.
ALL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 6, "topk_group": 3}

SCALED: dict[str, Any] = {"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0}

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
}

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 64,
    "final_logit_softcapping": 4.0,
}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT: dict[str, Any] = {
    "hidden_size": 160,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
# Three ranks share a group of heads.
MAMBA: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}

# What sets each family of the fast decoders apart: uneven heads, biases, per-head norms, windows, layers without
# rotary embeddings, half of them rotated, scaled logits and a bias on row-parallel layers, mixed windows, scaled and
# capped scores, heads of two kinds, layers that read others' keys, keys that are values, inputs of layers.
VARIANTS: dict[str, dict[str, Any]] = {
    "axk1": {**GROUPED, **LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v2": {**GROUPED, **LATENT, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    "deepseek_v3": {**GROUPED, **LATENT, "attention_bias": True, "rope_parameters": YARN, **ALL_EXPERTS},
    "llama": {},
    "mistral": {"sliding_window": 10},
    "ministral": WINDOWS,
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "seed_oss": {"attention_bias": True},
    "phi3": {"partial_rotary_factor": 0.5},
    "granite": {**SCALED, "attention_bias": True, "mlp_bias": True},
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "dots1": {**GROUPED, "sliding_window": 9},
    "glm4_moe": {**GROUPED, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {
        **GROUPED,
        **LATENT,
        "q_lora_rank": None,
        **ALL_EXPERTS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "minicpm3": {**LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 80},
    "mistral4": {
        **GROUPED,
        **LATENT,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 1.0},
    },
    "solar_open": GROUPED,
    "exaone_moe": {**GROUPED, **WINDOWS, "num_shared_experts": 2},
    "granitemoe": {**EXPERTS, **SCALED, "attention_multiplier": 0.1},
    "granitemoeshared": {
        **EXPERTS,
        **SCALED,
        "num_experts_per_tok": 4,
        "attention_multiplier": 0.1,
        "shared_intermediate_size": 64,
    },
    "granitemoehybrid": {
        **EXPERTS,
        **SCALED,
        **MAMBA,
        "num_experts_per_tok": 6,  # all: of few, rounding to bf16 would choose others
        "attention_multiplier": 0.1,
        "shared_intermediate_size": 64,
    },
    "hy_v3": {**EXPERTS, "num_shared_experts": 2, "router_scaling_factor": 1.7, "attention_bias": True},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "flex_olmo": {**EXPERTS, **THREE_HEADS},
    "gpt_oss": {**EXPERTS, **WINDOWS, "num_experts_per_tok": 5},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "minimax_m2": {
        **EXPERTS,
        "num_experts_per_tok": 5,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "olmoe": {**EXPERTS, **THREE_HEADS},
    "mellum": {**EXPERTS, **WINDOWS, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "qwen3_5_moe_text": {**EXPERTS, **ALL_EXPERTS, **DELTA, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**EXPERTS, **ALL_EXPERTS, **DELTA, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "gemma": {},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    "gemma3_text": WINDOWS,
    "gemma4_text": {
        **GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 14,
    },
    "gemma4_unified_text": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "youtu": {
        **LATENT,
        "attention_bias": True,
        "rope_interleave": False,
        "pad_token_id": None,  # transformers empties its embedding when it loads a model of this type
    },
}

# What sets Gemma 4 26B-A4B apart from the smaller ones.
GEMMA4_EXPERTS: dict[str, Any] = {
    **EXPERTS,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


def settings_for(model_type: str, **changes: Any) -> dict[str, Any]:
    """The whole configuration of a small model."""
    settings = {**BASE, **VARIANTS.get(model_type, {}), **changes}
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = [kinds[at % len(kinds)] for at in range(settings["num_hidden_layers"])]
    return settings


def auto_class(config: Any) -> Any:
    """transformers' class that makes models of such a configuration."""
    is_causal = config.get_text_config() is config and not family_of(config.model_type).listed_elsewhere
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def make_model(directory: Path, model_type: str, **changes: Any) -> Path:
    """Saves a random fp32 model whose weights are large enough for its logits to tell tokens apart."""
    config = CONFIG_MAPPING[model_type](**settings_for(model_type, **changes))
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *_learned_buffers(model)):
            spread = torch.randn(tensor.shape)
            is_scale = "norm" in name or "layer_scalar" in name
            tensor.copy_(1 + 0.1 * spread if is_scale else 0.12 * spread)
            if "gemma4" in model_type and "q_norm" in name:
                tensor.mul_(0.3)  # its attention scales no scores, so its norms do
    model.save_pretrained(str(directory))
    return directory


def _learned_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What is added to experts' scores to choose by, and scales of layers: zeros and ones in a new model."""
    ends = ("_bias", "layer_scalar")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends)]


def reference_logits(directory: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' own logits for each whole sequence: float32 [tokens, vocab] each."""
    model = AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


# Buffers that follow from a configuration, whatever a checkpoint says.
_DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def build(name: str, settings: dict[str, Any]) -> Any:
    """A random fp32 model of the architecture `name` (`model_type` or `model_type/form`)."""
    config = CONFIG_MAPPING[name.partition("/")[0]](**settings)
    torch.manual_seed(0)
    # Falcon's eager attention adds its linear biases twice; its other one adds them once.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not key.endswith(_DERIVED):
                spread = torch.randn(tensor.shape)
                of = ".".join(key.split(".")[-3:])
                is_scale = any(part in of for part in ("norm", "ln_", "layer_scalar"))
                tensor.copy_(1 + 0.1 * spread if is_scale else 0.12 * spread)
                if "gemma4" in name and "q_norm" in of:
                    tensor.mul_(0.3)  # its attention scales no scores, so its norms do
    return model.eval()


def save_as_part(model: Any, whole: str, directory: Path) -> None:
    """Saves the text model `model` as a checkpoint of the type `whole` has it, of which it is a part; for types whose
    other parts cannot be built here."""
    config = CONFIG_MAPPING[whole](text_config=model.config.to_dict())
    config.tie_word_embeddings = model.config.tie_word_embeddings
    config.save_pretrained(str(directory))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in model.state_dict().items()
    }
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def logits_of(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits for each whole sequence: float32 [tokens, vocab] each."""
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def precise_logits_of(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The same in float64, rounded at the end; of models with experts, which compute in a loop for it."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return [logits.float() for logits in logits_of(model, sequences)]

"""Settings of models without experts whose layers attend to all before them, or convolve. Pure."""

from math import erf, sqrt
from typing import Any

from services.executor.model.loading.gguf_settings.common import FULL, WIDTH, Compute, Said
from shared.errors import ModelLoadError


def _gemma4(said: Said) -> dict[str, Any]:
    """Layers with a window have heads of another width and number than those without, and rotary positions of their
    own. Where these have no values, the keys are the values. Layers that read others' keys may be twice as wide."""
    kinds, heads, widths = said.window_types(), said.by_layer("attention.head_count_kv"), said.by_layer(WIDTH)
    if (full := kinds.index(FULL) if FULL in kinds else -1) < 0:
        raise ModelLoadError("The file has windows in all layers (attention.sliding_window_pattern); fetch it again.")
    rotations = said.window_rotations()
    experts = said.count("expert_count")
    settings = {
        "layer_types": kinds,
        "head_dim": said["attention.key_length_swa"],
        "global_head_dim": said["attention.key_length"],
        "num_key_value_heads": next(
            (count for count, kind in zip(heads, kinds, strict=True) if kind != FULL), heads[0]
        ),
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in said.shapes,
        "num_kv_shared_layers": said.count("attention.shared_kv_layers"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": said["embedding_length_per_layer_input"],
        "vocab_size_per_layer_input": _embedded_by_layer(said),
        "rope_parameters": {**rotations, FULL: {**rotations[FULL], "rope_type": "proportional"}},
    }
    if experts:
        settings |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": said["expert_used_count"]}
    return settings


def _embedded_by_layer(said: Said) -> int:
    return said.shapes.get("per_layer_token_embd.weight", said.shapes["token_embd.weight"])[0]


def _gemma3n(said: Said) -> dict[str, Any]:
    """Of activations a file says how many standard deviations above the mean what stays begins, config.json what part
    of a normal distribution lies below."""
    scales = said.by_layer("activation_sparsity_scale")
    return {
        "layer_types": said.window_types(),
        "intermediate_size": said.by_layer(WIDTH),
        "activation_sparsity_pattern": [round((1 + erf(scale / sqrt(2))) / 2, 6) for scale in scales],
        "laurel_rank": said.shapes.get("blk.0.laurel_l.weight", (1,))[0],
        "vocab_size_per_layer_input": _embedded_by_layer(said),
    }


def _short_convolutions(said: Said) -> dict[str, Any]:
    """Layers without heads for keys are convolutions."""
    heads = said.by_layer("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in said.shapes),
    }


def _mistral3(said: Said) -> dict[str, Any]:
    """Models that scale queries by their position are Ministral 3's, others Mistral's."""
    rope = said.magnitudes(1.0, of_turned=1.0)
    if not (scale := said.get("attention.temperature_scale")):
        return {"model_type": "mistral", "rope_parameters": rope}
    return {"rope_parameters": {**rope, **said.scaled_queries(scale)}}


def _minicpm(said: Said) -> dict[str, Any]:
    """Granite's scales, as readers take them where older files say none: those of MiniCPM 2B."""
    width, layers = int(said["embedding_length"]), int(said["block_count"])
    head = int(said.get("attention.key_length") or width // max(1, int(said["attention.head_count"])))
    return {
        "attention_multiplier": max(1, head) ** -0.5,
        "embedding_multiplier": said.get("embedding_scale", 12.0),
        "residual_multiplier": said.get("residual_scale", 1.4 / sqrt(max(1, layers))),
        "logits_scaling": said.get("logit_scale", width / 256),
    }


def _falcon(said: Said) -> dict[str, Any]:
    """Models with one head of keys are of the first architecture, others of the second, most with two norms."""
    norms = 1 + ("blk.0.attn_norm_2.weight" in said.shapes)
    keys = said["attention.head_count_kv"]
    return {"multi_query": keys == 1, "new_decoder_architecture": keys != 1, "num_ln_in_parallel_attn": norms}


def _mpt(said: Said) -> dict[str, Any]:
    heads = said["attention.head_count"]
    if (keys := said.get("attention.head_count_kv", heads)) != heads:
        raise ModelLoadError(
            f"The file has {keys} heads of keys for {heads} of queries, which no model of its architecture that can be "
            "served has; choose another."
        )
    if (bias := said["attention.max_alibi_bias"]) != _ALIBI:
        raise ModelLoadError(
            f"The file says attention.max_alibi_bias {bias!r:.40}, and models of its architecture that can be served "
            f"have {_ALIBI}; choose another."
        )
    return {"max_seq_len": said["context_length"], "attn_config": {"clip_qkv": said.get("attention.clamp_kqv")}}


_ALIBI = 8  # by which transformers computes, whatever is said; 0: without


def _stablelm(said: Said) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in said.shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in said.shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in said.shapes,
    }


def _baichuan(said: Said) -> dict[str, Any]:
    """Nothing: 7B is Llama."""
    if said["block_count"] == 40:
        raise ModelLoadError(
            "The file holds Baichuan 13B, whose attention is biased by distances (ALiBi), as no model of its "
            "architecture that can be served is; choose another."
        )
    return {}


DENSE: dict[str, Compute] = {
    "mpt": _mpt,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "qwen": lambda said: {"intermediate_size": said["feed_forward_length"] // 2},
    "minicpm": _minicpm,
    "minicpm3": lambda said: {"qk_nope_head_dim": max(0, said["attention.key_length"] - said["rope.dimension_count"])},
    "gemma4": _gemma4,
    "gemma3n": _gemma3n,
    "short_convolutions": _short_convolutions,
    "mistral3": _mistral3,
    "baichuan": _baichuan,
}

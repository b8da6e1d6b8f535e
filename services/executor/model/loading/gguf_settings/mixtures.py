"""Settings of mixtures of experts and of attention to latents. Pure."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from services.executor.model.loading.gguf_settings.common import FULL, WIDTH, Compute, Said
from shared.errors import ModelLoadError


def _latent(said: Said) -> dict[str, Any]:
    """Newer files say the width of latents as that of a key, and those of a head's keys and values beside it. With no
    experts all layers are dense."""
    rotated, layers = int(said["rope.dimension_count"]), int(said["block_count"])
    whole = int(said.get("attention.key_length_mla") or said["attention.key_length"])
    experts = said.count("expert_count")
    settings = {
        "num_key_value_heads": said["attention.head_count"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": max(0, whole - rotated),
        "v_head_dim": int(said.get("attention.value_length_mla") or said["attention.value_length"]),
        "kv_lora_rank": said["attention.kv_lora_rank"],
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "rope_parameters": said.magnitudes(10.0),
        "first_k_dense_replace": said.count("leading_dense_block_count") if experts else layers,
    }
    return {**settings, **(grouped_experts(said) if experts else {})}


def grouped_experts(said: Said, usual: Mapping[int, tuple[int, int]] | None = None) -> dict[str, Any]:
    """Of experts, a part of whose groups a token may choose from. `usual`: by experts, (groups, those a token chooses
    from) where a file says none; None: as DeepSeek has them."""
    experts = int(said["expert_count"])
    groups, used = (int(said.get(f"expert_group_{key}", 0)) for key in ("count", "used_count"))
    if not groups or not used:
        groups, used = (_GROUPS if usual is None else usual).get(experts, (1, 1))
    return {
        "n_routed_experts": experts,
        "n_shared_experts": said.count("expert_shared_count"),
        "num_experts_per_tok": said["expert_used_count"],
        "moe_intermediate_size": said["expert_feed_forward_length"],
        "routed_scaling_factor": float(said.get("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(said.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": used,
    }


# By experts, of DeepSeek V2 and V3: (groups, those a token chooses from), which files did not say at first.
_GROUPS = {160: (8, 3), 256: (8, 4)}
_SOFTMAX, _SIGMOID = 1, 2  # `expert_gating_func`


def _deepseek(said: Said) -> dict[str, Any]:
    """V2 makes scores of experts by a softmax, V3 and what follows by a sigmoid, to which something is added before a
    choice is made; files did not say which at first."""
    is_added = any(name.endswith(".exp_probs_b.bias") for name in said.shapes)
    settings, gate = _latent(said), said.get("expert_gating_func") or (_SIGMOID if is_added else _SOFTMAX)
    if said.get("attention.temperature_scale"):
        raise ModelLoadError(
            "The file's model scales queries by their position (attention.temperature_scale), as no model of its "
            "architecture does that can be served; choose another."
        )
    if not said.get("expert_count") or gate == _SIGMOID:
        return settings
    if gate != _SOFTMAX or settings["norm_topk_prob"]:
        what = "expert_weights_norm with a softmax" if gate == _SOFTMAX else f"expert_gating_func {gate!r:.40}"
        raise ModelLoadError(f"The file says {what}, by which no model that can be served chooses; choose another.")
    method = "greedy" if settings["n_group"] == 1 else "group_limited_greedy"
    return {**settings, "model_type": "deepseek_v2", "topk_method": method}


def _check_gate(said: Said, expected: int) -> None:
    if (gate := said.get("expert_gating_func", expected)) != expected:
        raise ModelLoadError(
            f"The file says expert_gating_func {gate!r:.40}, by which no model of its architecture that can be served "
            "chooses; choose another."
        )


def _by_sigmoid(said: Said) -> dict[str, Any]:
    """Nothing, where scores of experts are made by a sigmoid, as all models of the architecture make them."""
    _check_gate(said, _SIGMOID)
    return {}


def _mistral4(said: Said) -> dict[str, Any]:
    """Latent attention and experts chosen by a softmax. Files made of transformers' checkpoints do not say by how much
    queries are scaled: all models have a tenth."""
    settings = _latent(said)
    _check_gate(said, _SOFTMAX)
    scaled = said.scaled_queries(said.get("attention.temperature_scale") or 0.1)
    width = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    rope = {**said.magnitudes(10.0, of_turned=1.0), **scaled}
    rope["partial_rotary_factor"] = settings["qk_rope_head_dim"] / max(1, width)
    return {**settings, "head_dim": width, "rope_parameters": rope}


def _mimo2(said: Said) -> dict[str, Any]:
    """Layers with a window have twice the heads of keys, and rotary positions of their own. A token sees as many before
    it as the file says the window is. Layers with a router have experts."""
    layers = said.layers
    kinds, heads = said.window_types()[:layers], said.by_layer("attention.head_count_kv")
    full = next((count for count, kind in zip(heads, kinds, strict=False) if kind == FULL), 0)
    if any(count != full * (1 + (kind != FULL)) for count, kind in zip(heads, kinds, strict=False)):
        raise ModelLoadError(
            "The file's layers with a window have other than twice the heads of keys that those without have "
            "(attention.head_count_kv), which no model of its architecture that can be served has; choose another."
        )
    part = int(said["rope.dimension_count"]) / int(said["attention.key_length"])
    rotations = said.window_rotations()
    scale = said.get("attention.value_scale")
    return {
        **grouped_experts(said),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mlp_layer_types": _by_routers(said, layers),
        "num_key_value_heads": full,
        "v_head_dim": said["attention.value_length"],
        "sliding_window": int(said["attention.sliding_window"]) + 1,
        "rope_parameters": {kind: {**rope, "partial_rotary_factor": part} for kind, rope in rotations.items()},
        **({} if scale is None else {"attention_value_scale": round(scale, 6)}),
    }


def _phimoe(said: Said) -> dict[str, Any]:
    """Files with factors of rotary positions do not say by how much what is turned is scaled: the one model that has
    some, Phi 3.5 MoE, has a scale of its own."""
    rope = said.rope()
    if "rope_factors_long.weight" in said.shapes:
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
    return {"lm_head_bias": "output.bias" in said.shapes, "rope_parameters": rope}


def _gpt_oss(said: Said) -> dict[str, Any]:
    """Where positions are scaled, the frequencies between which that is done in part are not rounded."""
    rope = said.rope()
    return {"rope_parameters": {**rope, "truncate": False} if "rope.scaling.factor" in said else rope}


def _llama4(said: Said) -> dict[str, Any]:
    """Of chunks, and of layers without positions between them, files say nothing, unless there are none: all models
    have the same. That of 128 experts does without norms of queries and keys."""
    layers, every = int(said["block_count"]), int(said["interleave_moe_layer_step"])
    settings: dict[str, Any] = {
        "use_qk_norm": said["expert_count"] != _MAVERICK,
        "moe_layers": [layer for layer in range(layers) if every and (layer + 1) % every == 0],
    }
    if said.get("attention.sliding_window") != 0:
        return settings
    of_layers = {"layer_types": ["full_attention"] * layers, "no_rope_layers": [1] * layers}
    return {**settings, **of_layers, "attn_temperature_tuning": False}


_MAVERICK = 128  # experts


def _granite_experts(said: Said) -> dict[str, Any]:
    """With a shared expert, models are of another type."""
    width = said.get("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared", "shared_intermediate_size": width} if width else {}


def _granite_shared(said: Said) -> dict[str, Any]:
    """The shared expert is all there is in layers without others, as wide as the layer."""
    return {"shared_intermediate_size": said.get("expert_shared_feed_forward_length") or said[WIDTH]}


def _indexed(said: Said) -> dict[str, Any]:
    """Latent attention to tokens that an indexer chooses. Layers without one take what the layer before has chosen."""
    _check_gate(said, _SIGMOID)
    layers = said.layers
    kinds = said.get("attention.indexer.types")
    if not isinstance(kinds, list | tuple):
        kinds = [f"blk.{layer}.indexer.attn_k.weight" in said.shapes for layer in range(layers)]
    return {
        **_latent(said),
        "num_hidden_layers": layers,
        "index_n_heads": said["attention.indexer.head_count"],
        "index_head_dim": said["attention.indexer.key_length"],
        "index_topk": said["attention.indexer.top_k"],
        "indexer_types": ["full" if kind else "shared" for kind in kinds[:layers]],
    }


def _one_group(said: Said) -> dict[str, Any]:
    """Of experts, all of which a token may choose from where a file says no groups."""
    return grouped_experts(said, {})


def _unnormed() -> ModelLoadError:
    return ModelLoadError(
        "The file's experts are weighted otherwise than by normed scores (expert_weights_norm, expert_weights_scale), "
        "as no model of its architecture that can be served does; choose another."
    )


def _afmoe(said: Said) -> dict[str, Any]:
    if not said.get("expert_weights_norm"):
        raise _unnormed()
    return {
        **said.fourth_full(int(said["block_count"])),
        "num_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "num_shared_experts": said.count("expert_shared_count"),
        "num_dense_layers": said["leading_dense_block_count"],
        "route_scale": float(said.get("expert_weights_scale") or 1.0),
    }


def _exaone_moe(said: Said) -> dict[str, Any]:
    layers = said.layers
    experts = _one_group(said)
    return {
        **experts,
        "first_k_dense_replace": said.count("leading_dense_block_count"),
        **said.fourth_full(layers),
        "num_hidden_layers": layers,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
    }


def _bailing(said: Said) -> dict[str, Any]:
    """As Granite's mixtures without their scales: scores are a softmax of those experts that are chosen."""
    _check_gate(said, _SOFTMAX)
    if not said.get("expert_weights_norm") or said.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise _unnormed()
    width, heads = said["embedding_length"], max(1, said["attention.head_count"])
    return {
        "num_local_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "intermediate_size": said["expert_feed_forward_length"],
        "shared_intermediate_size": said["expert_feed_forward_length"] * said.count("expert_shared_count"),
        "attention_multiplier": 1 / sqrt(said.get("attention.key_length", width // heads)),
    }


def _dbrx(said: Said) -> dict[str, Any]:
    return {
        "attn_config": {
            "kv_n_heads": said["attention.head_count_kv"],
            "clip_qkv": said["attention.clamp_kqv"],
            "rope_theta": said.rope()["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": said["feed_forward_length"],
            "moe_num_experts": said["expert_count"],
            "moe_top_k": said["expert_used_count"],
            "moe_normalize_expert_weights": 1.0,
        },
    }


def _hy_v3(said: Said) -> dict[str, Any]:
    """Layers with a router have experts, which are weighted by normed scores."""
    if not said.get("expert_weights_norm", True):
        raise _unnormed()
    layers, width = said.layers, int(said["expert_feed_forward_length"])
    return {
        "num_hidden_layers": layers,
        "mlp_layer_types": _by_routers(said, layers),
        "num_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "num_shared_experts": int(said.get("expert_shared_feed_forward_length", width)) // max(1, width),
        "router_scaling_factor": float(said.get("expert_weights_scale") or 1.0),
    }


def _by_routers(said: Said, layers: int) -> list[str]:
    return ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in said.shapes else "dense" for layer in range(layers)]


def _mellum(said: Said) -> dict[str, Any]:
    """Windows turn positions by the same base as other layers where a file says none of their own."""
    rotations = said.window_rotations(said.rope()["rope_theta"])
    return {"rope_parameters": rotations, **said.fourth_full(int(said["block_count"]))}


def _minimax_m3(said: Said) -> dict[str, Any]:
    """Layers with experts attend to blocks that an indexer chooses."""
    if not said.get("expert_weights_norm"):
        raise _unnormed()
    layers, width = int(said["block_count"]), said["expert_feed_forward_length"]
    mlps = _by_routers(said, layers)
    return {
        "mlp_layer_types": mlps,
        "layer_types": ["minimax_m3_sparse" if kind == "sparse" else FULL for kind in mlps],
        "num_local_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "intermediate_size": width,
        "shared_intermediate_size": width * int(said["expert_shared_count"]),
        "routed_scaling_factor": float(said.get("expert_weights_scale") or 1.0),
        "index_n_heads": said["attention.indexer.head_count"],
        "index_head_dim": said["attention.indexer.key_length"],
        "index_topk_blocks": said["attention.indexer.top_k"],
        "index_block_size": said["attention.indexer.block_size"],
        "index_local_blocks": said["attention.indexer.local_blocks"],
    }


MIXTURES: dict[str, Compute] = {
    "phimoe": _phimoe,
    "deepseek": _deepseek,
    "grouped_experts": lambda said: grouped_experts(said),
    "by_sigmoid": _by_sigmoid,
    "ernie_experts": lambda said: {"moe_num_shared_experts": said.count("expert_shared_count")},
    "mimo2": _mimo2,
    "mistral4": _mistral4,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "granite_experts": _granite_experts,
    "granite_shared": _granite_shared,
    "indexed": _indexed,
    "one_group": _one_group,
    "afmoe": _afmoe,
    "exaone_moe": _exaone_moe,
    "bailing": _bailing,
    "dbrx": _dbrx,
    "hy_v3": _hy_v3,
    "mellum": _mellum,
    "minimax_m3": _minimax_m3,
}

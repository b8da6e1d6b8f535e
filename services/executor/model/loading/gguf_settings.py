"""Settings of config.json that follow from several keys of a GGUF file, from a list by layer, or from its tensors, by
the names that rows of `families/gguf_architectures.py` have for them. Pure.
"""

from collections.abc import Callable, Mapping
from math import erf, sqrt
from typing import Any

from shared.errors import ModelLoadError

Said = Mapping[str, Any]  # the file's keys behind the architecture's name, numbers and lists of numbers
Shapes = Mapping[str, tuple[int, ...]]  # of the file's tensors, rows first
Compute = Callable[[Said, Shapes], dict[str, Any]]

_CLS = 2  # of `pooling_type`
_SIGMOID = 2  # of `expert_gating_func`


def _first_dense(said: Said, shapes: Shapes) -> dict[str, Any]:
    """How many layers are dense before those of experts."""
    return {"first_k_dense_replace": int(said.get("leading_dense_block_count", 0))}


def _gemma3_rotations(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Windows turn positions by a base of their own, 10,000 where a file says none."""
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    rope = {kind: {"rope_type": "default", "rope_theta": float(said.get(key, 10_000.0))} for kind, key in bases.items()}
    return {"rope_parameters": rope}


def _gated_delta(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers of a gated delta rule, between which each fourth has attention where a file says nothing else; behind
    them may be heads that predict several tokens, which `block_count` counts."""
    layers = int(said["block_count"]) - int(said.get("nextn_predict_layers", 0))
    every = max(1, int(said.get("full_attention_interval", 4)))
    recurrent = said.get("attention.recurrent_layers")
    if not isinstance(recurrent, list | tuple):
        recurrent = [(layer + 1) % every for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_value_head_dim": int(said["ssm.inner_size"]) // max(1, int(said["ssm.time_step_rank"])),
    }


def _by_layer(said: Said, key: str) -> list[Any]:
    """The value for each layer, of which files say one for all, or each. Raises `ModelLoadError`."""
    value, layers = said[key], int(said["block_count"])
    if not isinstance(value, list | tuple):
        return [value] * layers
    if len(value) != layers:
        raise ModelLoadError(f"The file has {len(value)} values of {key} for {layers} layers; fetch it again.")
    return list(value)


def _windows(said: Said) -> list[str]:
    sliding = _by_layer(said, "attention.sliding_window_pattern")
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def _gemma4(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers with a window have heads of another width and number than those without, and rotary positions of their
    own. Where these have no values, the keys are the values. Layers that read others' keys may be twice as wide."""
    kinds, heads, widths = _windows(said), _by_layer(said, "attention.head_count_kv"), _by_layer(said, _WIDTH)
    if (full := kinds.index(_FULL) if _FULL in kinds else -1) < 0:
        raise ModelLoadError("The file has windows in all layers (attention.sliding_window_pattern); fetch it again.")
    rotations = _gemma3_rotations(said, shapes)["rope_parameters"]
    experts = int(said.get("expert_count", 0))
    settings = {
        "layer_types": kinds,
        "head_dim": said["attention.key_length_swa"],
        "global_head_dim": said["attention.key_length"],
        "num_key_value_heads": next(
            (count for count, kind in zip(heads, kinds, strict=True) if kind != _FULL), heads[0]
        ),
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in shapes,
        "num_kv_shared_layers": int(said.get("attention.shared_kv_layers", 0)),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": said["embedding_length_per_layer_input"],
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", shapes["token_embd.weight"])[0],
        "rope_parameters": {**rotations, _FULL: {**rotations[_FULL], "rope_type": "proportional"}},
    }
    if experts:
        settings |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": said["expert_used_count"]}
    return settings


_FULL, _WIDTH = "full_attention", "feed_forward_length"


def _gemma3n(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Of activations a file says how many standard deviations above the mean what stays begins, config.json what part
    of a normal distribution lies below."""
    scales = _by_layer(said, "activation_sparsity_scale")
    return {
        "layer_types": _windows(said),
        "intermediate_size": _by_layer(said, _WIDTH),
        "activation_sparsity_pattern": [round((1 + erf(scale / sqrt(2))) / 2, 6) for scale in scales],
        "laurel_rank": shapes.get("blk.0.laurel_l.weight", (1,))[0],
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", shapes["token_embd.weight"])[0],
    }


def _short_convolutions(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers without heads for keys are convolutions."""
    heads = _by_layer(said, "attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in shapes),
    }


def _kimi_delta(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Kimi's delta attention in layers without key and value heads, between which there is latent attention."""
    layers, heads, dense = int(said["block_count"]), said["attention.head_count"], said.get("leading_dense_block_count")
    if said["expert_gating_func"] != _SIGMOID:
        raise ModelLoadError(
            f"The file says expert_gating_func {said['expert_gating_func']}, and experts of its architecture are "
            f"chosen by a sigmoid, {_SIGMOID}; fetch it again, or choose another."
        )
    return {
        "layer_types": [
            "full_attention" if count else "linear_attention" for count in _by_layer(said, "attention.head_count_kv")
        ],
        "mlp_layer_types": ["dense" if layer < int(dense or 0) else "sparse" for layer in range(layers)],
        "linear_num_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": said["rope.dimension_count"],
        "qk_nope_head_dim": said["attention.key_length_mla"] - said["rope.dimension_count"],
    }


def _latent(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Newer files say the width of latents as that of a key, and those of a head's keys and values beside it. With no
    experts all layers are dense."""
    rotated, layers = int(said["rope.dimension_count"]), int(said["block_count"])
    whole = int(said.get("attention.key_length_mla") or said["attention.key_length"])
    experts = int(said.get("expert_count", 0))
    settings = {
        "num_key_value_heads": said["attention.head_count"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": max(0, whole - rotated),
        "v_head_dim": int(said.get("attention.value_length_mla") or said["attention.value_length"]),
        "kv_lora_rank": said["attention.kv_lora_rank"],
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "rope_parameters": _magnitudes(said, 10.0),
        "first_k_dense_replace": int(said.get("leading_dense_block_count", 0)) if experts else layers,
    }
    return {**settings, **(_grouped_experts(said) if experts else {})}


def _magnitudes(said: Said, times: float, of_turned: float | None = None) -> dict[str, Any]:
    """Rotary positions. YaRN has a magnitude of scores, as files say it but for a factor, and one of what is turned:
    `of_turned`; None: the same."""
    rope = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base", 10_000.0))}
    if magnitude := said.get("rope.scaling.yarn_log_multiplier"):
        of_scores = round(times * magnitude, 6)
        rope |= {"mscale": of_scores if of_turned is None else of_turned, "mscale_all_dim": of_scores}
    return rope


def _grouped_experts(said: Said, usual: Mapping[int, tuple[int, int]] | None = None) -> dict[str, Any]:
    """Of experts, a part of whose groups a token may choose from. `usual`: by experts, (groups, those a token chooses
    from) where a file says none; None: as DeepSeek has them."""
    experts = int(said["expert_count"])
    groups, used = (int(said.get(f"expert_group_{key}", 0)) for key in ("count", "used_count"))
    if not groups or not used:
        groups, used = (_GROUPS if usual is None else usual).get(experts, (1, 1))
    return {
        "n_routed_experts": experts,
        "n_shared_experts": int(said.get("expert_shared_count", 0)),
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


def _deepseek(said: Said, shapes: Shapes) -> dict[str, Any]:
    """V2 makes scores of experts by a softmax, V3 and what follows by a sigmoid, to which something is added before a
    choice is made; files did not say which at first."""
    is_added = any(name.endswith(".exp_probs_b.bias") for name in shapes)
    settings, gate = _latent(said, shapes), said.get("expert_gating_func") or (_SIGMOID if is_added else _SOFTMAX)
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


def _by_sigmoid(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Nothing, where scores of experts are made by a sigmoid, as all models of the architecture make them."""
    _check_gate(said, _SIGMOID)
    return {}


def _mistral3(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Models that scale queries by their position are Ministral 3's, others Mistral's."""
    rope = _magnitudes(said, 1.0, of_turned=1.0)
    if not (scale := said.get("attention.temperature_scale")):
        return {"model_type": "mistral", "rope_parameters": rope}
    return {"rope_parameters": {**rope, **_scaled_queries(said, scale)}}


def _scaled_queries(said: Said, scale: float) -> dict[str, Any]:
    original = said["rope.scaling.original_context_length"]
    if (length := said.get("attention.temperature_length", original)) != original:
        raise ModelLoadError(
            f"The file scales queries each {length} positions (attention.temperature_length) and has an original "
            f"context of {original}, which no model of its architecture that can be served does; choose another."
        )
    return {"llama_4_scaling_beta": round(scale, 6), "original_max_position_embeddings": original}


def _mistral4(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Latent attention and experts chosen by a softmax. Files made of transformers' checkpoints do not say by how much
    queries are scaled: all models have a tenth."""
    settings = _latent(said, shapes)
    _check_gate(said, _SOFTMAX)
    scaled = _scaled_queries(said, said.get("attention.temperature_scale") or 0.1)
    width = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    rope = {**_magnitudes(said, 10.0, of_turned=1.0), **scaled}
    rope["partial_rotary_factor"] = settings["qk_rope_head_dim"] / max(1, width)
    return {**settings, "head_dim": width, "rope_parameters": rope}


def _without_heads_behind(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers but for those that predict several tokens, which `block_count` counts."""
    return {"num_hidden_layers": int(said["block_count"]) - int(said.get("nextn_predict_layers", 0))}


def _mimo2(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers with a window have twice the heads of keys, and rotary positions of their own. A token sees as many before
    it as the file says the window is. Layers with a router have experts."""
    layers = _without_heads_behind(said, shapes)["num_hidden_layers"]
    kinds, heads = _windows(said)[:layers], _by_layer(said, "attention.head_count_kv")
    full = next((count for count, kind in zip(heads, kinds, strict=False) if kind == _FULL), 0)
    if any(count != full * (1 + (kind != _FULL)) for count, kind in zip(heads, kinds, strict=False)):
        raise ModelLoadError(
            "The file's layers with a window have other than twice the heads of keys that those without have "
            "(attention.head_count_kv), which no model of its architecture that can be served has; choose another."
        )
    part = int(said["rope.dimension_count"]) / int(said["attention.key_length"])
    rotations = _gemma3_rotations(said, shapes)["rope_parameters"]
    scale = said.get("attention.value_scale")
    return {
        **_grouped_experts(said),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mlp_layer_types": _by_routers(layers, shapes),
        "num_key_value_heads": full,
        "v_head_dim": said["attention.value_length"],
        "sliding_window": int(said["attention.sliding_window"]) + 1,
        "rope_parameters": {kind: {**rope, "partial_rotary_factor": part} for kind, rope in rotations.items()},
        **({} if scale is None else {"attention_value_scale": round(scale, 6)}),
    }


def _ernie_experts(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"moe_num_shared_experts": int(said.get("expert_shared_count", 0))}


def _phimoe(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Files with factors of rotary positions do not say by how much what is turned is scaled: the one model that has
    some, Phi 3.5 MoE, has a scale of its own."""
    rope = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base", 10_000.0))}
    if "rope_factors_long.weight" in shapes:
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
    return {"lm_head_bias": "output.bias" in shapes, "rope_parameters": rope}


def _minicpm(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Granite's scales, as readers take them where older files say none: those of MiniCPM 2B."""
    width, layers = int(said["embedding_length"]), int(said["block_count"])
    head = int(said.get("attention.key_length") or width // max(1, int(said["attention.head_count"])))
    return {
        "attention_multiplier": max(1, head) ** -0.5,
        "embedding_multiplier": said.get("embedding_scale", 12.0),
        "residual_multiplier": said.get("residual_scale", 1.4 / sqrt(max(1, layers))),
        "logits_scaling": said.get("logit_scale", width / 256),
    }


def _falcon(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Models with one head of keys are of the first architecture, others of the second, most with two norms."""
    norms = 1 + ("blk.0.attn_norm_2.weight" in shapes)
    keys = said["attention.head_count_kv"]
    return {"multi_query": keys == 1, "new_decoder_architecture": keys != 1, "num_ln_in_parallel_attn": norms}


def _mpt(said: Said, shapes: Shapes) -> dict[str, Any]:
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


def _stablelm(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
    }


def _windows_in_turn(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Each so many layers one without a window, the last of them; files may say it of each layer."""
    every = said.get("attention.sliding_window_pattern")
    if isinstance(every, list | tuple):
        return {"layer_types": _windows(said)}
    return {} if every is None else {"sliding_window_pattern": int(every)}


def _learned_positions(said: Said, shapes: Shapes) -> dict[str, Any]:
    """BERT's. Of RoBERTa files leave out what its first token's position stands behind: it is a BERT then. DistilBERT
    tells no segments apart."""
    own = {"model_type": "distilbert", "hidden_dim": said["feed_forward_length"]}
    apart = "token_types.weight" in shapes
    return {
        "max_position_embeddings": _rows(shapes, "position_embd.weight"),
        **(_segments(said, shapes) if apart else own),
    }


def _segments(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"type_vocab_size": _rows(shapes, "token_types.weight")}


def _modern_bert(said: Said, shapes: Shapes) -> dict[str, Any]:
    """The first of each three layers sees all of a text, where a file says nothing else. Classes are scored by the mean
    of a text's states, or the first one's."""
    every, count = said.get("attention.sliding_window_pattern", 3), int(said["block_count"])
    sliding = every if isinstance(every, list | tuple) else [layer % max(1, int(every)) for layer in range(count)]
    slides = bool(said.get("attention.sliding_window"))
    return {
        **_gemma3_rotations(said, shapes),
        "layer_types": ["sliding_attention" if one and slides else _FULL for one in sliding],
        "classifier_pooling": "cls" if said.get("classifier.pooling_type") == _CLS else "mean",
        "classifier_bias": "cls.bias" in shapes,
        "norm_bias": "output_norm.bias" in shapes,
    }


def _rows(shapes: Shapes, tensor: str) -> int:
    if tensor not in shapes:
        raise ModelLoadError(f"The file has no tensor {tensor}, which its architecture calls for; choose another.")
    return shapes[tensor][0] if len(shapes[tensor]) > 1 else 1  # one row may be written as a vector


def _gpt_oss(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Where positions are scaled, the frequencies between which that is done in part are not rounded."""
    rope = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base", 10_000.0))}
    return {"rope_parameters": {**rope, "truncate": False} if "rope.scaling.factor" in said else rope}


def _llama4(said: Said, shapes: Shapes) -> dict[str, Any]:
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


def _granite_experts(said: Said, shapes: Shapes) -> dict[str, Any]:
    """With a shared expert, models are of another type."""
    width = said.get("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared", "shared_intermediate_size": width} if width else {}


def _granite_shared(said: Said, shapes: Shapes) -> dict[str, Any]:
    """The shared expert is all there is in layers without others, as wide as the layer."""
    return {"shared_intermediate_size": said.get("expert_shared_feed_forward_length") or said[_WIDTH]}


def _mamba_2(said: Said, shapes: Shapes) -> dict[str, Any]:
    width, heads = int(said["ssm.inner_size"]), int(said["ssm.time_step_rank"])
    return {"mamba_d_head": width // max(1, heads), "mamba_expand": width // max(1, int(said["embedding_length"]))}


def _mamba_layers(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers without heads for keys have a state space."""
    heads = _by_layer(said, "attention.head_count_kv")
    kinds = ["full_attention" if count else "linear_attention" for count in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(heads)}


def _bamba(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Half of a head turns in all models."""
    heads = _by_layer(said, "attention.head_count_kv")
    width = said.get("attention.key_length", said["embedding_length"] // max(1, said["attention.head_count"]))
    if 2 * said["rope.dimension_count"] != width:
        raise ModelLoadError(
            f"The file turns {said['rope.dimension_count']} of {width} values of a head (rope.dimension_count), and "
            "models of its architecture that can be served turn half of them; choose another."
        )
    return {
        "attn_layer_indices": [layer for layer, count in enumerate(heads) if count],
        "num_key_value_heads": max(heads),
    }


def _nemotron_h(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers are attention where they have heads for keys, feed-forward where they have a width, and state spaces else.
    Behind them may be one that predicts tokens."""
    if by_layer := [key for key in ("expert_feed_forward_length", "expert_used_count") if _is_list(said.get(key))]:
        raise ModelLoadError(
            f"The file's layers have experts of their own kinds ({by_layer[0]} is a list), which no model of its "
            "architecture that can be served has; choose another."
        )
    layers, experts = _without_heads_behind(said, shapes)["num_hidden_layers"], said.get("expert_count")
    heads, widths = (_by_layer(said, key)[:layers] for key in ("attention.head_count_kv", _WIDTH))
    feed_forward = "moe" if experts else "mlp"
    settings = {
        "num_hidden_layers": layers,
        "layers_block_type": [
            _FULL if count else feed_forward if width else "linear_attention"
            for count, width in zip(heads, widths, strict=True)
        ],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "mamba_head_dim": int(said["ssm.inner_size"]) // max(1, int(said["ssm.time_step_rank"])),
    }
    if experts:
        shared = said["expert_shared_feed_forward_length"]
        settings |= {**_grouped_experts(said), "moe_shared_expert_intermediate_size": shared}
    return settings


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _falcon_h1(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in shapes)}


def _mamba(said: Said, shapes: Shapes) -> dict[str, Any]:
    """As wide inside as `expand` times outside. Falcon's has norms of what its scan is made of."""
    width = int(said["ssm.inner_size"])
    settings = {"intermediate_size": width, "expand": width // max(1, int(said["embedding_length"]))}
    return {**settings, "model_type": "falcon_mamba"} if said.get("ssm.dt_b_c_rms") else settings


def _mamba2(said: Said, shapes: Shapes) -> dict[str, Any]:
    heads = int(said["ssm.time_step_rank"])
    return {**_mamba(said, shapes), "head_dim": int(said["ssm.inner_size"]) // max(1, heads)}


def _jamba(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers with heads for keys have attention, some have experts: each so many-th."""
    heads, layers = _by_layer(said, "attention.head_count_kv"), int(said["block_count"])
    experts = [
        any(f"blk.{layer}.ffn_{one}.weight" in shapes for one in ("gate_inp", "up_exps")) for layer in range(layers)
    ]
    return {
        **_each("attn", heads, "attention (attention.head_count_kv)"),
        **_each("expert", experts, "experts (ffn_gate_inp.weight)"),
        "num_key_value_heads": max(heads),
        "mamba_expand": int(said["ssm.inner_size"]) // max(1, int(said["embedding_length"])),
    }


def _each(kind: str, layers: list[Any], what: str) -> dict[str, Any]:
    """Each so many-th of `layers` that is something, and the first. Raises `ModelLoadError`."""
    found = [layer for layer, one in enumerate(layers) if one]
    first = found[0] if found else len(layers)
    period = found[1] - first if len(found) > 1 else len(layers) + 1
    if found != [layer for layer in range(len(layers)) if layer % period == first]:
        raise ModelLoadError(
            f"The file's layers {', '.join(map(str, found))} have {what}, and models of its architecture that can be "
            "served have them at even distances; choose another."
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}


def _normed_heads(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}


def _biases_of_all(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Of queries, keys and values, which may be one tensor."""
    return {"attention_bias": "blk.0.attn_qkv.bias" in shapes or "blk.0.attn_q.bias" in shapes}


def _indexed(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Latent attention to tokens that an indexer chooses. Layers without one take what the layer before has chosen."""
    _check_gate(said, _SIGMOID)
    layers = _without_heads_behind(said, shapes)["num_hidden_layers"]
    kinds = said.get("attention.indexer.types")
    if not isinstance(kinds, list | tuple):
        kinds = [f"blk.{layer}.indexer.attn_k.weight" in shapes for layer in range(layers)]
    return {
        **_latent(said, shapes),
        "num_hidden_layers": layers,
        "index_n_heads": said["attention.indexer.head_count"],
        "index_head_dim": said["attention.indexer.key_length"],
        "index_topk": said["attention.indexer.top_k"],
        "indexer_types": ["full" if kind else "shared" for kind in kinds[:layers]],
    }


def _one_group(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Of experts, all of which a token may choose from where a file says no groups."""
    return _grouped_experts(said, {})


def _fourth_full(said: Said, layers: int) -> dict[str, Any]:
    """Windows in all layers but each fourth, where a file says nothing else of them."""
    pattern = said.get("attention.sliding_window_pattern", 4)
    if not isinstance(pattern, list | tuple):
        pattern = [(layer + 1) % max(1, int(pattern)) for layer in range(layers)]
    if len(pattern) < layers:
        raise ModelLoadError(
            f"The file has {len(pattern)} values of attention.sliding_window_pattern for {layers} layers; fetch it "
            "again."
        )
    kinds = ["sliding_attention" if one else _FULL for one in pattern[:layers]]
    return {"layer_types": kinds, "sliding_window": said["attention.sliding_window"]}


def _unnormed() -> ModelLoadError:
    return ModelLoadError(
        "The file's experts are weighted otherwise than by normed scores (expert_weights_norm, expert_weights_scale), "
        "as no model of its architecture that can be served does; choose another."
    )


def _afmoe(said: Said, shapes: Shapes) -> dict[str, Any]:
    if not said.get("expert_weights_norm"):
        raise _unnormed()
    return {
        **_fourth_full(said, int(said["block_count"])),
        "num_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "num_shared_experts": int(said.get("expert_shared_count", 0)),
        "num_dense_layers": said["leading_dense_block_count"],
        "route_scale": float(said.get("expert_weights_scale") or 1.0),
    }


def _exaone_moe(said: Said, shapes: Shapes) -> dict[str, Any]:
    layers = _without_heads_behind(said, shapes)["num_hidden_layers"]
    experts = _one_group(said, shapes)
    return {
        **experts,
        **_first_dense(said, shapes),
        **_fourth_full(said, layers),
        "num_hidden_layers": layers,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
    }


def _bailing(said: Said, shapes: Shapes) -> dict[str, Any]:
    """As Granite's mixtures without their scales: scores are a softmax of those experts that are chosen."""
    _check_gate(said, _SOFTMAX)
    if not said.get("expert_weights_norm") or said.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise _unnormed()
    width, heads = said["embedding_length"], max(1, said["attention.head_count"])
    return {
        "num_local_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "intermediate_size": said["expert_feed_forward_length"],
        "shared_intermediate_size": said["expert_feed_forward_length"] * int(said.get("expert_shared_count", 0)),
        "attention_multiplier": 1 / sqrt(said.get("attention.key_length", width // heads)),
    }


def _baichuan(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Nothing: 7B is Llama."""
    if said["block_count"] == 40:
        raise ModelLoadError(
            "The file holds Baichuan 13B, whose attention is biased by distances (ALiBi), as no model of its "
            "architecture that can be served is; choose another."
        )
    return {}


def _dbrx(said: Said, shapes: Shapes) -> dict[str, Any]:
    theta = float(said.get("rope.freq_base", 10_000.0))
    return {
        "attn_config": {
            "kv_n_heads": said["attention.head_count_kv"],
            "clip_qkv": said["attention.clamp_kqv"],
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": said["feed_forward_length"],
            "moe_num_experts": said["expert_count"],
            "moe_top_k": said["expert_used_count"],
            "moe_normalize_expert_weights": 1.0,
        },
    }


def _hy_v3(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers with a router have experts, which are weighted by normed scores."""
    if not said.get("expert_weights_norm", True):
        raise _unnormed()
    layers, width = _without_heads_behind(said, shapes)["num_hidden_layers"], int(said["expert_feed_forward_length"])
    return {
        "num_hidden_layers": layers,
        "mlp_layer_types": _by_routers(layers, shapes),
        "num_experts": said["expert_count"],
        "num_experts_per_tok": said["expert_used_count"],
        "num_shared_experts": int(said.get("expert_shared_feed_forward_length", width)) // max(1, width),
        "router_scaling_factor": float(said.get("expert_weights_scale") or 1.0),
    }


def _by_routers(layers: int, shapes: Shapes) -> list[str]:
    return ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in shapes else "dense" for layer in range(layers)]


def _mellum(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Windows turn positions by the same base as other layers where a file says none of their own."""
    same = {"rope.freq_base_swa": said.get("rope.freq_base", 10_000.0)}
    return {**_gemma3_rotations({**same, **said}, shapes), **_fourth_full(said, int(said["block_count"]))}


def _minimax_m3(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers with experts attend to blocks that an indexer chooses."""
    if not said.get("expert_weights_norm"):
        raise _unnormed()
    layers, width = int(said["block_count"]), said["expert_feed_forward_length"]
    mlps = _by_routers(layers, shapes)
    return {
        "mlp_layer_types": mlps,
        "layer_types": ["minimax_m3_sparse" if kind == "sparse" else _FULL for kind in mlps],
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


COMPUTED: dict[str, Compute] = {
    "mpt": _mpt,
    "stablelm": _stablelm,
    "falcon": _falcon,
    # `feed_forward_length` counts gate and up.
    "qwen": lambda said, shapes: {"intermediate_size": said["feed_forward_length"] // 2},
    "command_r": lambda said, shapes: {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes},
    "phimoe": _phimoe,
    "minicpm": _minicpm,
    "minicpm3": lambda said, shapes: {
        "qk_nope_head_dim": max(0, said["attention.key_length"] - said["rope.dimension_count"])
    },
    "first_dense": _first_dense,
    "gemma3_rotations": _gemma3_rotations,
    "gated_delta": _gated_delta,
    "gemma4": _gemma4,
    "gemma3n": _gemma3n,
    "short_convolutions": _short_convolutions,
    "kimi_delta": _kimi_delta,
    "deepseek": _deepseek,
    "grouped_experts": lambda said, shapes: _grouped_experts(said),
    "by_sigmoid": _by_sigmoid,
    "ernie_experts": _ernie_experts,
    "without_heads_behind": _without_heads_behind,
    "mimo2": _mimo2,
    "mistral3": _mistral3,
    "mistral4": _mistral4,
    "learned_positions": _learned_positions,
    "modern_bert": _modern_bert,
    "segments": _segments,
    "windows_in_turn": _windows_in_turn,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "granite_experts": _granite_experts,
    "granite_shared": _granite_shared,
    "mamba_2": _mamba_2,
    "mamba_layers": _mamba_layers,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "normed_heads": _normed_heads,
    "biases_of_all": _biases_of_all,
    "indexed": _indexed,
    "one_group": _one_group,
    "afmoe": _afmoe,
    "exaone_moe": _exaone_moe,
    "bailing": _bailing,
    "baichuan": _baichuan,
    "dbrx": _dbrx,
    "hy_v3": _hy_v3,
    "mellum": _mellum,
    "minimax_m3": _minimax_m3,
}

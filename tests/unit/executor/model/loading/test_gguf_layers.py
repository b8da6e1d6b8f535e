"""GGUF files of models whose layers differ, written from transformers' models in llama.cpp's layout, against these."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.gguf_models import EXPERTS, KEYS, Changes, Keys, Tensors, apart, names_of, words, written
from tests.unit.executor.model.lanes import in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    Wrong,
    assert_codes,
    assert_model,
    assert_near_what_is_unpacked,
    assert_refused,
    converted,
    theirs,
)
from tests.unit.executor.model.tiny import GEMMA4_EXPERTS, make_model

SIZES: Keys = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 192}
SHARED: Keys = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 32,
    "final_logit_softcapping": 4.0,
}
CONVOLUTIONS: Keys = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
MODELS: dict[str, tuple[str, str, Keys]] = {  # (transformers' type, the file's architecture, settings)
    "gemma4": ("gemma4_text", "gemma4", {"hidden_size_per_layer_input": 32}),
    # All experts for each token: of few, rounded activations would choose others.
    "gemma4/experts": ("gemma4_text", "gemma4", {**GEMMA4_EXPERTS, "moe_intermediate_size": 64, "top_k_experts": 6}),
    "lfm2": ("lfm2", "lfm2", {**CONVOLUTIONS, "block_multiple_of": 32, "intermediate_size": 192}),
    "lfm2_moe": (
        "lfm2_moe",
        "lfm2moe",
        {
            **CONVOLUTIONS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        "gemma3n",
        {
            **SHARED,
            "activation_sparsity_pattern": [0.9, 0.0, 0.95, 0.0, 0.0, 0.0],
            "laurel_rank": 32,
            "intermediate_size": [96] * 6,
        },
    ),
}


def keys_of(config: Any) -> Keys:
    epsilon = "rms_norm_eps" if hasattr(config, "rms_norm_eps") else "norm_eps"
    widths = dict.fromkeys(("attention.value_length", "rope.dimension_count"), "head_dim")
    return words({**KEYS, **widths, "attention.layer_norm_rms_epsilon": epsilon})(config)


def of_windows(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def of_gemma4(config: Any) -> Keys:
    layers = range(config.num_hidden_layers)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    per_layer = [config.per_layer_config[layer] for layer in layers]
    keys = {
        "attention.key_length": max(layer.head_dim for layer in per_layer),
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in per_layer],
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [config.intermediate_size * (1 + (layer >= first)) for layer in layers]
    if config.enable_moe_block:
        keys |= words({**EXPERTS, "expert_used_count": "top_k_experts"})(config)
    keys["attention.value_length"] = keys["rope.dimension_count"] = keys["attention.key_length"]
    return {**of_windows(config), **keys}


def of_lfm2(config: Any) -> Keys:
    keys = {
        "attention.head_count_kv": [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if config.model_type == "lfm2_moe":
        keys |= words(EXPERTS)(config)
        keys |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    elif config.block_auto_adjust_ff_dim:
        width = 2 * config.intermediate_size // 3
        keys["feed_forward_length"] = -(-width // config.block_multiple_of) * config.block_multiple_of
    return keys


def of_gemma3n(config: Any) -> Keys:
    parts = config.activation_sparsity_pattern
    return {
        **of_windows(config),
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": [NormalDist().inv_cdf(part) if part else -math.inf for part in parts],
    }


OWN_KEYS: Mapping[str, Callable[[Any], Keys]] = {
    "gemma4": of_gemma4,
    "gemma3n": of_gemma3n,
    "lfm2": of_lfm2,
    "lfm2moe": of_lfm2,
}
# Tensors that end otherwise than the model's.
SUFFIXES = {"expert_bias": ".bias", "_proj": ".weight", "layer_scalar": ".weight", "correct_output_scale": ".weight"}


def tensors_of(model: Any, architecture: str) -> Tensors:
    config, state = model.config, model.state_dict()
    names = names_of(architecture, config.num_hidden_layers)
    parts = state.items() if architecture == "gemma4" else apart(state)
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in parts:
        if name == "lm_head.weight":
            continue
        layer = name.split(".")[2]
        if name.startswith("model.altup_"):
            stacks.setdefault("altup_unembd_proj" if "unembed" in name else "altup_proj", []).append(tensor)
        elif name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", tensor
        elif name.endswith("per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", tensor
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            behind = next((suffix for end, suffix in SUFFIXES.items() if name.endswith(end)), "")
            yield stored + behind, tensor.squeeze(1) if "conv.conv.weight" in name else tensor
    for name, matrices in stacks.items():
        yield f"{name}.weight", torch.stack(matrices)
    first = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    for layer in range(first, config.num_hidden_layers):  # what nothing reads
        like = f"model.layers.{config.layer_types.index(config.layer_types[layer])}.self_attn"
        for of, stored in (("k_proj", "attn_k"), ("v_proj", "attn_v"), ("k_norm", "attn_k_norm")):
            yield f"blk.{layer}.{stored}.weight", torch.ones_like(state[f"{like}.{of}.weight"])
    if architecture == "gemma4":
        half = config.per_layer_config["full_attention"].head_dim // 2
        yield "rope_freqs.weight", torch.tensor([1.0] * (half // 4) + [1e30] * (half - half // 4))


def make(
    tmp_path: Path, name: str, kind: str, keys: Keys | None = None, tensors: Changes | None = None
) -> tuple[Path, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    model_type, architecture, changes = MODELS[name]
    source = make_model(tmp_path / "plain", model_type, **{**SIZES, **changes})
    model = theirs(source)
    model.config.allow_global_per_layer_attribute_access = True  # Gemma 4's, of layers with a window
    said = {**keys_of(model.config), **OWN_KEYS[architecture](model.config), **(keys or {})}
    held = {**dict(tensors_of(model, architecture)), **(tensors or {})}
    return source, written(tmp_path / "model.gguf", architecture, said, held, kind)


FAST = ["gemma4", "gemma3n", "lfm2"]  # lists by layer and keys that others read, stacks, convolutions


@pytest.mark.parametrize(("name", "ranks"), in_rings(MODELS, FAST, [("gemma4", 3), ("lfm2", 3)]))
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    source, file = make(tmp_path, name, "F32")
    assert_model(converted(file), ranks, theirs(source), within=0, unsaid=UNSAID.get(name, ()))


UNSAID = {
    # Which Gemma 4 calls by other names.
    "gemma4/experts": {"num_experts_per_tok", "n_routed_experts", "num_local_experts"},
    "lfm2": {"intermediate_size", "block_auto_adjust_ff_dim", "block_multiple_of"},  # one width follows from them
}


@natively
@pytest.mark.parametrize("name", in_lanes(MODELS, ["gemma4"]))
def test_the_kernels_compute_with_the_codes(tmp_path: Path, name: str) -> None:
    _, file = make(tmp_path, name, "Q8_0")
    made = converted(file)
    assert_codes(made)
    assert_near_what_is_unpacked(file, runner_of(made, native=True))


WRONG: list[Wrong] = [
    ("gemma4", {"attention.key_length_swa": None}, {}, r"does not say gemma4\.attention\.key_length_swa"),
    ("gemma4", {"attention.sliding_window": None}, {}, r"does not say gemma4\.attention\.sliding_window"),
    ("gemma4", {"attention.head_count_kv": [3, 3]}, {}, r"2 values of attention\.head_count_kv for 6 layers"),
    ("gemma4", {"attention.sliding_window_pattern": [True] * 6}, {}, r"windows in all layers"),
    ("gemma4", {}, {"rope_freqs.weight": None}, r"no tensor rope_freqs\.weight"),
    ("gemma4", {}, {"rope_freqs.weight": torch.full((32,), 2.0)}, r"rope_freqs\.weight says other than which"),
    ("gemma4", {}, {"blk.3.layer_output_scale.weight": None}, r"no tensor model\.layers\.3\.layer_scalar"),
    ("gemma4", {}, {"blk.3.attn_q.weight": torch.ones(96, 192)}, r"layers\.3\.self_attn\.q_proj\.weight has the shape"),
    ("gemma4", {}, {"blk.3.attn_k.weight": None}, r"no tensor .*layers\.3\.self_attn\.k_proj"),
    ("gemma3n", {}, {"altup_proj.weight": torch.ones(2, 192, 192)}, r"no tensor altup_proj\.weight .* a matrix 2"),
    ("gemma3n", {"attention.shared_kv_layers": None}, {}, r"does not say gemma3n\.attention\.shared_kv_layers"),
    ("gemma3n", {"activation_sparsity_scale": None}, {}, r"does not say gemma3n\.activation_sparsity_scale"),
    ("lfm2", {"shortconv.l_cache": None}, {}, r"does not say lfm2\.shortconv\.l_cache"),
    ("lfm2", {}, {"blk.0.shortconv.conv.weight": torch.ones(192, 3)}, r"layers\.0\.conv\.conv\.weight has the shape"),
    ("lfm2_moe", {"leading_dense_block_count": None}, {}, r"does not say lfm2moe\.leading_dense_block_count"),
    ("lfm2_moe", {}, {"blk.1.ffn_up_exps.weight": None}, r"no tensor blk\.1\.ffn_up_exps\.weight"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    assert_refused(file, message)

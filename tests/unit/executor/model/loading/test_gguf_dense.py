"""GGUF files of dense models beside Llama and Gemma, written from transformers' models in llama.cpp's layout, held
against them."""

import re
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.executor.model.loading.gguf_transforms import interleaved
from tests.unit.executor.model.architectures import OWN_NAMES
from tests.unit.executor.model.common_settings import GROUPED
from tests.unit.executor.model.gguf_models import Changes, Keys, Tensors, apart, names_of, written
from tests.unit.executor.model.lanes import LOWERED, in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    Wrong,
    assert_as_near_as_own_codes,
    assert_codes,
    assert_model,
    assert_refused,
    converted,
    held_by,
)
from tests.unit.executor.model.tiny import BASE, LATENT, build

SIZES: Keys = {
    **BASE,
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "pad_token_id": None,
}
UNTIED: Keys = {"tie_word_embeddings": False}
EXPERTS: Keys = {"num_experts_per_tok": 2, "num_experts": 6, "num_local_experts": 6, **UNTIED}
PHIMOE: Keys = {**EXPERTS, "lm_head_bias": True, "attention_bias": True}
HALF: Keys = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + at / 8 for at in range(16)],
    "long_factor": [2.0 + at / 8 for at in range(16)],
    "original_max_position_embeddings": 256,
}
LONG: Keys = {"max_position_embeddings": 256, "rope_parameters": LONGROPE}
MSCALES = dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
MINICPM: Keys = {
    "attention_multiplier": 32**-0.5,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_bias": False,
    "mlp_bias": False,
}
NEOX: Keys = {**HALF, **UNTIED, "num_key_value_heads": 6}
SIX: Keys = {"num_attention_heads": 6}
NEW_FALCON: Keys = {"new_decoder_architecture": True, "multi_query": False, "num_kv_heads": 3}
OLDER_MINICPM = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / sqrt(3), "logits_scaling": 192 / 256}
MODELS: dict[str, tuple[str, str, Keys]] = {  # (transformers' type, the file's architecture, settings)
    "cohere2": ("cohere2", "cohere2", {"num_hidden_layers": 5, "sliding_window": 9, "logit_scale": 0.7}),
    # Of few experts, rounded activations would choose others.
    "olmoe": ("olmoe", "olmoe", {**EXPERTS, "num_key_value_heads": 6, "num_experts_per_tok": 6}),
    "olmoe/few": ("olmoe", "olmoe", {**EXPERTS, "num_key_value_heads": 6}),
    "phi2": ("phi", "phi2", {**HALF, **UNTIED}),
    "phimoe": ("phimoe", "phimoe", {**PHIMOE, "sliding_window": 9}),
    "phimoe/long": ("phimoe", "phimoe", {**PHIMOE, **LONG, "rope_parameters": {**LONGROPE, **MSCALES}}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": 9}),
    "starcoder2/unsaid": ("starcoder2", "starcoder2", {"sliding_window": 4096, **UNTIED}),
    "command-r": ("cohere", "command-r", {"logit_scale": 0.7, "use_qk_norm": True}),
    "command-r/plain": ("cohere", "command-r", {"logit_scale": 0.7}),
    "exaone": ("llama", "exaone", UNTIED),
    "internlm2": ("llama", "internlm2", UNTIED),
    "xverse": ("llama", "xverse", UNTIED),
    "olmo": ("olmo", "olmo", {"clip_qkv": 0.4}),
    "minicpm": ("granite", "minicpm", MINICPM),
    "minicpm/long": ("granite", "minicpm", {**MINICPM, **LONG}),
    "minicpm/older": ("granite", "minicpm", {**MINICPM, **OLDER_MINICPM}),
    "minicpm3": ("minicpm3", "minicpm3", {**LATENT, "v_head_dim": 32}),
    "minicpm3/long": ("minicpm3", "minicpm3", {**LATENT, "v_head_dim": 32, **LONG}),
    "nemotron": ("nemotron", "nemotron", {**HALF, **UNTIED}),
    "gptneox": ("gpt_neox", "gptneox", NEOX),
    "gptneox/sequential": ("gpt_neox", "gptneox", {**NEOX, "use_parallel_residual": False}),
    "falcon": ("falcon", "falcon", {**SIX, "multi_query": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1}),
    "falcon/new": ("falcon", "falcon", {**SIX, **NEW_FALCON}),
    "falcon/one_norm": ("falcon", "falcon", {**SIX, **NEW_FALCON, "num_ln_in_parallel_attn": 1}),
    "qwen": ("qwen2", "qwen", {**UNTIED, "num_key_value_heads": 6}),
    "codeshell": ("starcoder2", "codeshell", {**UNTIED, "sliding_window": None}),
    "gpt2": ("gpt2", "gpt2", {"n_head": 6, "n_inner": 768}),
    "gpt2/untied": ("gpt2", "gpt2", {"n_head": 6, "n_inner": 96, **UNTIED}),
    "starcoder": ("gpt_bigcode", "starcoder", {"n_head": 6, "n_inner": 768}),
    "mpt": ("mpt", "mpt", {"n_heads": 6, "max_seq_len": 128, "attn_config": {"clip_qkv": 0.9}}),
    "mpt/unclipped": ("mpt", "mpt", {"n_heads": 6, "max_seq_len": 128, "attn_config": {}}),
    "stablelm": ("stablelm", "stablelm", {**HALF, **UNTIED, "use_qkv_bias": True}),
    "stablelm/12b": ("stablelm", "stablelm", {**HALF, **UNTIED, "qk_layernorm": True, "use_parallel_residual": True}),
    "bloom": ("bloom", "bloom", {"n_head": 6}),
    "phi2/older": ("phi", "phi2", {**HALF, **UNTIED, "num_key_value_heads": 6}),
}
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
UNKNOWN = {*GROUPED, "intermediate_size"}  # to older types
WIDTHS = ("intermediate_size", "n_inner", "ffn_hidden_size")
# Queries and keys of them turn channels side by side.
PAIRED = ("internlm2", "xverse", "olmo", "minicpm")


def keys_of(name: str, config: Any) -> Keys:
    epsilon = next((value for one in EPSILONS if (value := getattr(config, one, None))), 1e-5)
    has_rms = getattr(config, "rms_norm_eps", None)
    rope = getattr(config, "rope_parameters", None) or {}
    width = next((value for one in WIDTHS if (value := getattr(config, one, None))), 4 * config.hidden_size)
    keys: Keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        f"attention.layer_norm_{'rms_' * bool(has_rms)}epsilon": has_rms or epsilon,
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(config.hidden_size // config.num_attention_heads * rope.get(PARTIAL, 1)),
    }
    own = OWN_KEYS.get(name) or OWN_KEYS.get(MODELS[name][1])
    return {**keys, **(own(config) if own else {})}


PARTIAL = "partial_rotary_factor"


def of_cohere(config: Any) -> Keys:
    return {"logit_scale": config.logit_scale, "attention.sliding_window": getattr(config, "sliding_window", None)}


def of_phimoe(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "attention.sliding_window": config.sliding_window or 0,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }


def of_minicpm(config: Any) -> Keys:
    words = {"embedding_scale": "embedding", "residual_scale": "residual", "logit_scale": "logits"}
    ends = {"logits": "_scaling"}
    return {key: getattr(config, f"{word}{ends.get(word, '_multiplier')}") for key, word in words.items()}


def of_minicpm3(config: Any) -> Keys:
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def of_falcon(config: Any) -> Keys:
    return {"attention.head_count_kv": config.num_kv_heads, "rope.dimension_count": None}


OWN_KEYS: Mapping[str, Callable[[Any], Keys]] = {
    "cohere2": of_cohere,
    "command-r": of_cohere,
    "olmoe": lambda config: {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok},
    "phimoe": of_phimoe,
    "starcoder2": lambda config: {"attention.sliding_window": config.sliding_window},
    "starcoder2/unsaid": lambda config: {},
    "olmo": lambda config: {"attention.clamp_kqv": config.clip_qkv},
    "minicpm": of_minicpm,
    "minicpm/long": lambda config: {**of_minicpm(config), "rope.scaling.type": "longrope"},
    "minicpm/older": lambda config: {},
    "minicpm3": of_minicpm3,
    "starcoder": lambda config: {"attention.head_count_kv": 1},
    "mpt": lambda config: {
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
    },
    "gptneox": lambda config: {"use_parallel_residual": config.use_parallel_residual},
    "falcon": of_falcon,
    "qwen": lambda config: {"feed_forward_length": 2 * config.intermediate_size, "attention.head_count_kv": None},
}


# Of the models of Qwen and CodeShell transformers has others', whose parts are tensors of their own.
JOINED = ("qwen", "codeshell", "phi2/older")


def ungrouped(tensor: Tensor, config: Any) -> Tensor:
    """All queries, all keys, all values."""
    groups = getattr(config, "num_kv_heads", None) or config.num_attention_heads
    heads = tensor.unflatten(0, (groups, config.num_attention_heads // groups + 2, -1))
    return torch.cat([heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])


TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [in, out] in GPT-2, [out, in] in files and in layers


def changed(tensor: Tensor, own: str, stored: str, architecture: str, config: Any) -> Tensor:
    """As the file has it; `own` and `stored` are the model's name and the file's."""
    if architecture in PAIRED and (".attn_q." in stored or ".attn_k." in stored):
        return interleaved(tensor, tensor.shape[0] // config.head_dim)
    if architecture == "nemotron" and stored.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and own.endswith(TURNED):
        return tensor.T
    return ungrouped(tensor, config) if "query_key_value" in own else tensor


def whole_of(name: str, own: str) -> str | None:
    """The tensor of the file of which the model's parameter is a part."""
    patterns = {r"layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms": "blk.{}.attn_{}_norm.weight"}
    if name in JOINED:
        patterns[r"layers\.(\d+)\.self_attn\.[qkv]_proj\.(.*)"] = "blk.{}.attn_qkv.{}"
    found = ((re.search(pattern, own), whole) for pattern, whole in patterns.items())
    return next((whole.format(*match.groups()) for match, whole in found if match), None)


def tensors_of(name: str, model: Any) -> Tensors:
    architecture, config = MODELS[name][1], model.config
    names = names_of(architecture, config.num_hidden_layers)
    several: dict[str, list[Tensor]] = {}
    for own, tensor in apart(model.state_dict()):
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if whole := whole_of(name, own):
            several.setdefault(whole, []).append(tensor)
            continue
        stored = names.get_name(own.removeprefix("transformer." * (architecture == "bloom")), (".weight", ".bias"))
        assert stored is not None, own
        yield stored, changed(tensor, own, stored, architecture, config)
    for stored, parts in several.items():
        yield stored, torch.stack(parts) if "norm" in stored else torch.cat(parts)
    for length in ("long", "short"):
        if factors := (getattr(config, "rope_parameters", None) or {}).get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", torch.tensor(factors)


def make(
    tmp_path: Path, name: str, kind: str, keys: Keys | None = None, tensors: Changes | None = None
) -> tuple[Any, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    model_type, architecture, changes = MODELS[name]
    sizes = {key: value for key, value in SIZES.items() if model_type not in OWN_NAMES or key not in UNKNOWN}
    model = build(model_type, {**sizes, **changes})
    said = {**keys_of(name, model.config), **(keys or {})}
    held = {**dict(tensors_of(name, model)), **(tensors or {})}
    return model, written(tmp_path / "model.gguf", architecture, said, held, kind)


# Factors of a longer context; rows by group; parts with biases; transposed; rows of a matrix
FAST = ["phimoe/long", "falcon/new", "qwen", "gpt2", "stablelm/12b"]
RINGS = [("olmo", 3), ("falcon/new", 3), ("qwen", 2), ("gpt2", 2), ("stablelm/12b", 3)]


@pytest.mark.parametrize(("name", "ranks"), in_rings(MODELS, FAST, RINGS))
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    plain, file = make(tmp_path, name, "F32")
    held = held_by(plain)
    if name.startswith("gpt2"):
        held |= {key: value.T for key, value in held.items() if key.endswith(TURNED)}
    assert_model(converted(file), ranks, plain, held, unsaid=["attn_config"], spread=0.05)


@natively
@pytest.mark.parametrize("name", in_lanes([name for name in MODELS if "/" not in name], [], ["gpt2", "phi2", "falcon"]))
def test_the_codes_are_the_models(tmp_path: Path, name: str) -> None:
    """Kept as they are, and computed with where the kernels know the model."""
    _, file = make(tmp_path, name, "Q8_0")
    made = converted(file)
    assert_codes(made)
    if MODELS[name][0] in LOWERED:
        assert assert_as_near_as_own_codes(made).is_native


WRONG: list[Wrong] = [
    ("cohere2", {"attention.sliding_window": None}, {}, r"does not say cohere2\.attention\.sliding_window"),
    ("cohere2", {"attention.layer_norm_epsilon": None}, {}, r"does not say cohere2\.attention\.layer_norm"),
    ("command-r", {"logit_scale": None}, {}, r"does not say command-r\.logit_scale"),
    ("command-r", {}, {"blk.1.attn_k_norm.weight": None}, r"no tensor .*layers\.1\.self_attn\.k_norm"),
    ("olmoe", {"expert_used_count": None}, {}, r"does not say olmoe\.expert_used_count"),
    ("olmoe", {}, {"blk.1.ffn_gate_exps.weight": None}, r"no tensor blk\.1\.ffn_gate_exps\.weight"),
    ("phi2", {"rope.dimension_count": None}, {}, r"does not say phi2\.rope\.dimension_count"),
    ("phi2", {}, {"output.bias": None}, r"no tensor lm_head\.bias"),
    ("phimoe/long", {}, {"rope_factors_long.weight": None}, r"no tensor rope_factors_long\.weight"),
    ("minicpm3", {"attention.kv_lora_rank": None}, {}, r"does not say minicpm3\.attention\.kv_lora_rank"),
    ("minicpm3", {"attention.key_length": None}, {}, r"does not say minicpm3\.attention\.key_length"),
    ("nemotron", {}, {"blk.1.attn_norm.bias": torch.ones(191)}, r"input_layernorm\.bias has the shape \[191\]"),
    ("gptneox", {"use_parallel_residual": None}, {}, r"does not say gptneox\.use_parallel_residual"),
    ("gptneox", {}, {"blk.1.attn_qkv.bias": torch.ones(575)}, r"query_key_value\.bias has the shape \[575\]"),
    ("falcon/new", {"attention.head_count_kv": None}, {}, r"does not say falcon\.attention\.head_count_kv"),
    ("falcon/new", {"attention.head_count_kv": 2}, {}, r"query_key_value\.weight has the shape \[384, 192\] where"),
    ("falcon/new", {}, {"blk.1.attn_norm_2.bias": None}, r"no tensor .*h\.1\.ln_attn\.bias"),
    ("qwen", {}, {"blk.1.attn_qkv.bias": None}, r"no tensor blk\.1\.attn_qkv\.bias"),
    ("qwen", {}, {"blk.1.attn_qkv.weight": torch.ones(575, 192)}, r"blk\.1\.attn_qkv\.weight has the shape \[575"),
    ("gpt2", {}, {"blk.1.attn_qkv.weight": torch.ones(192, 576)}, r"c_attn\.weight has the shape \[192, 576\] where"),
    ("gpt2", {}, {"position_embd.weight": None}, r"no tensor transformer\.wpe\.weight"),
    ("mpt", {"attention.max_alibi_bias": None}, {}, r"does not say mpt\.attention\.max_alibi_bias"),
    ("mpt", {"attention.max_alibi_bias": 0.0}, {}, r"says attention\.max_alibi_bias 0\.0, and"),
    ("mpt", {"attention.head_count_kv": 3}, {}, r"has 3 heads of keys for 6 of queries"),
    (
        "stablelm/12b",
        {},
        {"blk.1.attn_q_norm.weight": torch.ones(7, 32)},
        r"attn_q_norm\.weight has the shape \[7, 32\]",
    ),
    ("stablelm/12b", {}, {"blk.1.attn_k_norm.weight": None}, r"no tensor blk\.1\.attn_k_norm\.weight"),
    ("stablelm", {}, {"blk.1.ffn_norm.bias": None}, r"no tensor .*layers\.1\.post_attention_layernorm\.bias"),
    ("bloom", {}, {"token_embd_norm.bias": None}, r"no tensor transformer\.word_embeddings_layernorm\.bias"),
    ("olmo", {}, {"output_norm.weight": torch.ones(192)}, r"hold a tensor output_norm\.weight"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    assert_refused(file, message)

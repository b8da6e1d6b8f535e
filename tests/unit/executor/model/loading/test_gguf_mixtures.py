"""GGUF files of mixtures of experts and of latent attention: written from transformers' models in llama.cpp's layout,
held against them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from services.executor.model.loading.gguf_transforms import interleaved
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.gguf_models import EXPERTS, KEYS, Changes, Keys, Tensors, apart, names_of, words, written
from tests.unit.executor.model.lanes import in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    Wrong,
    assert_as_near_as_own_codes,
    assert_codes,
    assert_model,
    assert_refused,
    converted,
    theirs,
)
from tests.unit.executor.model.ring import mixed_script, on_ring
from tests.unit.executor.model.tiny import ALL_EXPERTS, YARN, make_model

ONE_MAGNITUDE: Keys = {"rope_parameters": {**YARN, "mscale": 0.9}}
V2: Keys = {**ONE_MAGNITUDE, "norm_topk_prob": False}
LITE: Keys = {**V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
# Rounded activations would choose others of few experts: all of them for each token.
EVEN_HEADS: Keys = {"num_attention_heads": 6, "head_dim": 32, "hidden_size": 96}
# Queries are scaled by their position.
SCALED: Keys = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0}
V3: Keys = {"attention_bias": False, "head_dim": 32, **ALL_EXPERTS}
TURNED: Keys = {key: value for key, value in YARN.items() if "mscale" not in key}
OSS: Keys = {**EVEN_HEADS, "intermediate_size": 64}
MODELS: dict[str, tuple[str, str, Keys]] = {  # (transformers' type, the file's architecture, settings)
    "deepseek_v2": ("deepseek_v2", "deepseek2", {**V2, **ALL_EXPERTS}),
    "deepseek_v2/lite": ("deepseek_v2", "deepseek2", LITE),
    "deepseek_v2/older": ("deepseek_v2", "deepseek2", LITE),  # keys and values of latents in one tensor
    "deepseek_v3": ("deepseek_v3", "deepseek2", {**V3, **ONE_MAGNITUDE}),
    "deepseek_v3/unscaled": (
        "deepseek_v3",
        "deepseek2",
        {**V3, "q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": {"rope_theta": 5e4}},
    ),
    # A token chooses five of six.
    "minimax_m2": ("minimax_m2", "minimax-m2", {"head_dim": 32, "num_attention_heads": 6, "intermediate_size": 64}),
    "dots1": ("dots1", "dots1", {**EVEN_HEADS, **ALL_EXPERTS, "sliding_window": None, "n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "ernie4_5-moe",
        {**EVEN_HEADS, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 2, "moe_k": 6},
    ),
    "ernie4_5_moe/alone": ("ernie4_5_moe", "ernie4_5-moe", {**EVEN_HEADS, "moe_num_shared_experts": 0, "moe_k": 6}),
    "mistral3": ("ministral3", "mistral3", {**EVEN_HEADS, "rope_parameters": SCALED}),
    "mistral3/unscaled": ("mistral", "mistral3", {**EVEN_HEADS, "sliding_window": None}),
    "mistral4": (
        "mistral4",
        "mistral4",
        {**ALL_EXPERTS, "head_dim": 64, "rope_parameters": {**SCALED, "partial_rotary_factor": 0.5}},
    ),
    "mimo2": (
        "mimo_v2_flash",
        "mimo2",
        {
            **EVEN_HEADS,
            **ALL_EXPERTS,
            "n_routed_experts": 6,
            "n_shared_experts": 0,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,
            "head_dim": 64,
            "v_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
            "attention_value_scale": 0.7,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
                for kind, base in (("full_attention", 5e5), ("sliding_attention", 1e4))
            },
        },
    ),
    # Which transformers does not have; what it has of GLM 4.5 computes the same.
    "bailing": (
        "glm4_moe",
        "bailingmoe2",
        {
            **EVEN_HEADS,
            **ALL_EXPERTS,
            "use_qk_norm": True,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 6e5, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": ("gpt_oss", "gpt-oss", {**OSS, "rope_parameters": {**TURNED, "truncate": False}}),
    "gpt_oss/unscaled": ("gpt_oss", "gpt-oss", {**OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
}
LLAMA4: Keys = {
    **EVEN_HEADS,
    "num_hidden_layers": 4,  # of which the last turns nothing
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 6,
    "interleave_moe_layer_step": 2,
}
MODELS |= {
    "llama4": ("llama4_text", "llama4", LLAMA4),
    # As many experts as Maverick has; no chunks.
    "llama4/many": (
        "llama4_text",
        "llama4",
        {
            **LLAMA4,
            "num_local_experts": 128,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 1,
            "layer_types": ["full_attention"],
            "no_rope_layers": [1] * 4,
            "attn_temperature_tuning": False,
        },
    ),
}
WIDE: Keys = {"moe_intermediate_size": 64, "tie_word_embeddings": False}


def rotations_of(config: Any) -> Keys:
    rope = config.rope_parameters
    if "full_attention" in rope:
        return {}
    keys = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] != "yarn":
        return keys
    said = {name: rope[name] for name in ("factor", "beta_fast", "beta_slow")}
    keys |= {f"rope.scaling.{'' if name == 'factor' else 'yarn_'}{name}": float(said[name]) for name in said}
    original = rope["original_max_position_embeddings"]
    return {**keys, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": original}


def experts_of(config: Any) -> Keys:
    keys = {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": getattr(config, "n_shared_experts", None),
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": bool(config.norm_topk_prob),
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", None),
    }
    if (config.n_group or 1) > 1:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return keys


LOCAL = {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}
local_experts_of = words({**EXPERTS, **LOCAL})


def of_deepseek(config: Any, older: bool) -> Keys:
    rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
    keys: Keys = {**experts_of(config), "rope.dimension_count": rope, "attention.kv_lora_rank": latent}
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.model_type == "deepseek_v2":
        keys.pop("expert_weights_norm")
    else:
        keys["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    widths = {"key_length": config.qk_nope_head_dim + rope, "value_length": config.v_head_dim}
    if older:
        keys |= {f"attention.{name}": width for name, width in widths.items()}
    else:
        keys |= {f"attention.{name}_mla": width for name, width in widths.items()}
        keys |= {"attention.key_length": latent + rope, "attention.value_length": latent, "attention.head_count_kv": 1}
    if magnitude := config.rope_parameters.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * magnitude
    return keys


def of_minimax(config: Any, older: bool) -> Keys:
    return {
        **local_experts_of(config),
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }


def of_dots1(config: Any, older: bool) -> Keys:
    return {**experts_of(config), "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID)}


def of_ernie(config: Any, older: bool) -> Keys:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts or None,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size or None,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
    }


def of_mistral3(config: Any, older: bool) -> Keys:
    rope = config.rope_parameters
    keys = {"rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"), "rope.dimension_count": config.head_dim}
    return {**keys, "attention.temperature_scale": rope.get("llama_4_scaling_beta")}


def of_mistral4(config: Any, older: bool) -> Keys:
    softmax = int(gguf.ExpertGatingFuncType.SOFTMAX)
    rope = config.rope_parameters
    keys = {"scale": rope["llama_4_scaling_beta"], "length": rope["original_max_position_embeddings"]}
    own = {f"attention.temperature_{name}": value for name, value in keys.items()}
    return {**of_deepseek(config, older), "expert_gating_func": softmax, **own}


def of_bailing(config: Any, older: bool) -> Keys:
    turned = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    heads = {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    return {**of_dots1(config, older), **heads, "rope.dimension_count": turned}


def of_mimo2(config: Any, older: bool) -> Keys:
    """With a head for several tokens behind the layers, as there is in tensors."""
    sliding = [kind == "sliding_attention" for kind in config.layer_types] + [True]
    rope = config.rope_parameters
    return {
        **{
            key: value for key, value in of_dots1(config, older).items() if "shared" not in key and "leading" not in key
        },
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [config.num_key_value_heads * (1 + one) for one in sliding],
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": sliding,
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "rope.dimension_count": config.head_dim // 2,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def of_llama4(config: Any, older: bool) -> Keys:
    return {
        **local_experts_of(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "attention.sliding_window": None if "chunked_attention" in config.layer_types else 0,
    }


OWN_KEYS: Mapping[str, Callable[[Any, bool], Keys]] = {
    "deepseek2": of_deepseek,
    "minimax-m2": of_minimax,
    "dots1": of_dots1,
    "ernie4_5-moe": of_ernie,
    "mimo2": of_mimo2,
    "mistral3": of_mistral3,
    "bailingmoe2": of_bailing,
    "mistral4": of_mistral4,
    "gpt-oss": lambda config, older: {**local_experts_of(config), "attention.sliding_window": config.sliding_window},
    "llama4": of_llama4,
}


def keys_of(name: str, config: Any) -> Keys:
    said = {key: getattr(config, word) for key, word in KEYS.items()}
    said["attention.value_length"] = config.head_dim
    return {**said, **rotations_of(config), **OWN_KEYS[MODELS[name][1]](config, name.endswith("/older"))}


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def tensors_of(name: str, model: Any) -> Tensors:
    architecture, config = MODELS[name][1], model.config
    names = names_of(architecture, config.num_hidden_layers)
    joined: list[Tensor] = []
    if architecture in ("bailingmoe2", "mimo2"):
        yield f"blk.{config.num_hidden_layers}.nextn.enorm.weight", torch.ones(config.hidden_size)  # of a head behind
    for own, tensor in apart(dict(rows_first(model))):
        if own.endswith("kv_b_proj.weight") and not name.endswith("/older"):
            layer = own.split(".")[2]
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield f"blk.{layer}.attn_k_b.weight", keys.transpose(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", values
            continue
        if architecture == "bailingmoe2" and own.endswith(QKV):
            joined.append(tensor)
            if len(joined) == len(QKV):
                yield f"blk.{own.split('.')[2]}.attn_qkv.weight", torch.cat(joined)
                joined.clear()
            continue
        if own.endswith(("gate_up_proj_bias", "down_proj_bias")):
            sides = zip(("gate", "up"), tensor.chunk(2, 1), strict=True) if "gate" in own else [("down", tensor)]
            yield from ((f"blk.{own.split('.')[2]}.ffn_{side}_exps.bias", part) for side, part in sides)
            continue
        if own.endswith("self_attn.sinks"):
            yield f"blk.{own.split('.')[2]}.attn_sinks.weight", tensor
            continue
        if own.endswith("correction_bias"):
            yield f"blk.{own.split('.')[2]}.exp_probs_b.bias", tensor.flatten()
            continue
        stored = names.get_name(own, (".weight", ".bias"))
        assert stored is not None, own
        if architecture == "mistral3" and (".attn_q." in stored or ".attn_k." in stored):
            tensor = interleaved(tensor, tensor.shape[0] // config.head_dim)
        yield stored, tensor


def rows_first(model: Any) -> Tensors:
    """The state, of experts all outputs before their inputs and all gate values before all up values."""
    for name, tensor in model.state_dict().items():
        experts = model.get_submodule(name.rpartition(".")[0]) if ".experts." in name else None
        if tensor.dim() == 3 and (getattr(experts, "is_transposed", False) or "Llama4" in type(experts).__name__):
            tensor = tensor.transpose(1, 2)
        if "gate_up" in name and not getattr(experts, "is_concatenated", True):
            tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
        yield name, tensor


def make(
    tmp_path: Path, name: str, kind: str, keys: Keys | None = None, tensors: Changes | None = None
) -> tuple[Path, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    model_type, architecture, changes = MODELS[name]
    source = make_model(tmp_path / "plain", model_type, **{**WIDE, **changes})
    model = theirs(source)
    said = {**keys_of(name, model.config), **(keys or {})}
    held = {**dict(tensors_of(name, model)), **(tensors or {})}
    return source, written(tmp_path / "model.gguf", architecture, said, held, kind)


# transposed parts; parts of a tensor; experts the other way
FAST = ["deepseek_v3", "bailing", "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "ranks"), in_rings(MODELS, FAST, [("deepseek_v2", 2), ("deepseek_v3", 3), ("gpt_oss", 3)])
)
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    source, file = make(tmp_path, name, "F32")
    assert_model(converted(file), ranks, theirs(source), within=0)


# Whose codes are not those of the rows: latents' keys, which are transposed.
UNPACKED = ("kv_b_proj",)
# Computed by modules, whose codes stay packed but for those of routers.
ROUTERS = ("router.weight", "mlp.gate.weight", "_bias")
BY_PYTORCH = ("mistral3", "mimo2", "llama4", "llama4/many")


@natively
@pytest.mark.parametrize("name", in_lanes(MODELS, FAST, ["llama4", "gpt_oss", "deepseek_v2"]))
def test_the_kernels_compute_with_the_codes(tmp_path: Path, name: str) -> None:
    _, file = make(tmp_path, name, "Q8_0")
    made = converted(file)
    assert_codes(made, () if name.endswith("/older") else UNPACKED)
    runner = assert_as_near_as_own_codes(made)
    assert runner.is_native == (name not in BY_PYTORCH)
    if not runner.is_native:
        assert all(key.endswith(ROUTERS) for key in plain_matrices(runner))


def plain_matrices(runner: Any) -> set[str]:
    return {key for key, held in runner._model.named_parameters() if held.dim() > 1 and held.numel()}


@natively
@pytest.mark.parametrize("name", in_lanes(["gpt_oss", "llama4"], ["gpt_oss"]))
def test_ranks_that_share_no_memory_multiply_by_codes(tmp_path: Path, name: str) -> None:
    source, file = make(tmp_path, name, "Q8_0")
    made, expected = converted(file), truth(source, mixed_script()[0].sequences)

    def work(member: Any) -> Tensor:
        runner = runner_of(made, native=True, collectives=member)
        assert not runner.is_native
        assert all(key.endswith(ROUTERS) for key in plain_matrices(runner))
        return errors(runner, expected)

    assert on_ring(2, work)[0].mean() < 0.05 * torch.stack([row.std() for row in expected]).mean()


WRONG: list[Wrong] = [
    ("deepseek_v3", {"attention.kv_lora_rank": None}, {}, r"does not say deepseek2\.attention\.kv_lora_rank"),
    ("deepseek_v3", {"expert_used_count": None}, {}, r"does not say deepseek2\.expert_used_count"),
    ("deepseek_v3", {"attention.temperature_scale": 0.1}, {}, r"attention\.temperature_scale"),
    ("deepseek_v3", {"expert_gating_func": 3}, {}, r"says expert_gating_func 3"),
    ("deepseek_v2", {"expert_weights_norm": True}, {}, r"says expert_weights_norm with a softmax"),
    ("deepseek_v3", {"rope.dimension_count": 16}, {}, r"attn_k_b\.weight has the shape \[5, 96, 32\]"),
    ("deepseek_v3", {}, {"blk.1.attn_k_b.weight": None}, r"no tensor blk\.1\.attn_k_b\.weight"),
    ("deepseek_v3", {}, {"blk.1.attn_v_b.weight": torch.ones(5, 96, 64)}, r"blk\.1\.attn_v_b\.weight has the shape"),
    ("deepseek_v3", {}, {"blk.1.attn_kv_b.weight": torch.ones(480, 96)}, r"hold a tensor blk\.1\.attn_[kv]_b\.weight"),
    ("minimax_m2", {"expert_count": None}, {}, r"does not say minimax-m2\.expert_count"),
    ("minimax_m2", {"rope.dimension_count": None}, {}, r"does not say minimax-m2\.rope\.dimension_count"),
    ("minimax_m2", {"expert_gating_func": 1}, {}, r"says expert_gating_func 1"),
    ("minimax_m2", {}, {"blk.1.attn_k_norm.weight": None}, r"no tensor .*layers\.1\.self_attn\.k_norm"),
    ("ernie4_5_moe", {"interleave_moe_layer_step": None}, {}, r"does not say ernie4_5-moe\.interleave_moe_layer_step"),
    ("dots1", {"expert_feed_forward_length": None}, {}, r"does not say dots1\.expert_feed_forward_length"),
    ("mistral3", {"rope.scaling.original_context_length": None}, {}, r"does not say mistral3\.rope\.scaling\.original"),
    ("mistral4", {"attention.temperature_length": 7}, {}, r"queries each 7 positions"),
    ("mistral4", {"expert_gating_func": 2}, {}, r"says expert_gating_func 2"),
    ("bailing", {}, {"blk.1.attn_qkv.weight": None}, r"no tensor blk\.1\.attn_qkv\.weight"),
    ("bailing", {}, {"blk.1.attn_qkv.weight": torch.ones(385, 96)}, r"attn_qkv\.weight has the shape \[385, 96\]"),
    ("mimo2", {"attention.value_length": None}, {}, r"does not say mimo2\.attention\.value_length"),
    ("mimo2", {"attention.head_count_kv": [3, 3, 3, 3, 3]}, {}, r"other than twice the heads"),
    ("mimo2", {}, {"blk.1.attn_sinks.weight": None}, r"no tensor .*layers\.1\.self_attn\.sinks"),
    ("llama4", {"interleave_moe_layer_step": None}, {}, r"does not say llama4\.interleave_moe_layer_step"),
    ("llama4", {"interleave_moe_layer_step": 1}, {}, r"no tensor blk\.0\.ffn_gate_exps\.weight"),
    ("llama4", {}, {"blk.1.ffn_up_shexp.weight": None}, r"no tensor .*1\.feed_forward\.shared_expert\.up_proj"),
    ("gpt_oss", {"attention.sliding_window": None}, {}, r"does not say gpt-oss\.attention\.sliding_window"),
    ("gpt_oss", {"expert_feed_forward_length": None}, {}, r"does not say gpt-oss\.expert_feed_forward_length"),
    ("gpt_oss", {}, {"blk.1.attn_sinks.weight": None}, r"no tensor .*layers\.1\.self_attn\.sinks"),
    ("gpt_oss", {}, {"blk.1.ffn_up_exps.bias": None}, r"no tensor blk\.1\.ffn_up_exps\.bias"),
    ("gpt_oss", {}, {"blk.1.ffn_up_exps.bias": torch.ones(5, 64)}, r"blk\.1\.ffn_up_exps\.bias do not fit"),
    ("gpt_oss", {}, {"blk.1.ffn_up_exps.weight": torch.ones(6, 64, 97)}, r"blk\.1\.ffn_up_exps\.weight do not fit"),
    ("gpt_oss", {}, {"blk.1.ffn_down_exps.weight": torch.ones(6, 64, 96)}, r"shape \[6, 64, 96\] where .* \[6, 96, 64"),
    ("deepseek_v3", {}, {"blk.1.exp_probs_b.bias": None}, r"no tensor .*layers\.1\.mlp\.gate\.e_score_correction_bias"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    assert_refused(file, message)

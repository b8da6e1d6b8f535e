"""GGUF files of models with state spaces, and of Granite's mixtures: written from transformers' models in llama.cpp's
layout, held against them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.executor.model.loading.gguf_transforms import interleaved
from tests.unit.executor.model.gguf_models import KEYS, Changes, Keys, Tensors, apart, names_of, written
from tests.unit.executor.model.lanes import LOWERED, in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    Wrong,
    assert_as_near_as_own_codes,
    assert_codes,
    assert_model,
    assert_refused,
    converted,
    held_by,
    theirs,
)
from tests.unit.executor.model.loading.test_gguf_mixtures import experts_of
from tests.unit.executor.model.tiny import ALL_EXPERTS, MAMBA, make_model

# Their files do not say how wide a head is.
GRANITE: Keys = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, **ALL_EXPERTS}
ONE_GROUP: Keys = {"mamba_n_groups": 1, "shared_intermediate_size": 96}
BAMBA: Keys = {
    **{key: value for key, value in MAMBA.items() if key != "layer_types"},
    "hidden_size": 96,
    "head_dim": 32,
    "attn_layer_indices": [1, 3],
}
NEMOTRON_H: Keys = {
    "hidden_size": 96,
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "n_groups": 3,
    "ssm_state_size": 32,
    "tie_word_embeddings": False,
}
NEMOTRON_H_MOE: Keys = {
    **NEMOTRON_H,
    "num_experts_per_tok": 3,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
FALCON_H1: Keys = {
    "hidden_size": 96,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 32,
    "mamba_d_ssm": 192,
    "mamba_norm_before_gate": False,
    "tie_word_embeddings": False,
}
# Of which files hold the products with the weights.
MULTIPLIERS: Keys = {
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.8],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [1.4, 0.9],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
DENSE: Keys = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "expert_layer_period": 4,
    "expert_layer_offset": 3,
}
MAMBA_1: Keys = {"hidden_size": 96, "state_size": 32, "time_step_rank": 32, "intermediate_size": 192}
MODELS: dict[str, tuple[str, str, Keys]] = {  # (transformers' type, the file's architecture, settings)
    "granitemoe": ("granitemoe", "granitemoe", GRANITE),
    "granitemoe/shared": ("granitemoeshared", "granitemoe", GRANITE),
    "granitehybrid": ("granitemoehybrid", "granitehybrid", GRANITE),
    "granitehybrid/dense": (
        "granitemoehybrid",
        "granitehybrid",
        {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 2, **ONE_GROUP},
    ),
    "bamba": ("bamba", "granitehybrid", BAMBA),
    "nemotron_h": (
        "nemotron_h",
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h_moe": ("nemotron_h", "nemotron_h_moe", NEMOTRON_H_MOE),
    "nemotron_h_moe/latent": ("nemotron_h", "nemotron_h_moe", {**NEMOTRON_H_MOE, "moe_latent_size": 32, "n_groups": 1}),
    # With a layer behind that predicts tokens.
    "nemotron_h_moe/behind": ("nemotron_h", "nemotron_h_moe", {**NEMOTRON_H_MOE, "num_nextn_predict_layers": 1}),
    "falcon_h1": ("falcon_h1", "falcon-h1", {**FALCON_H1, **MULTIPLIERS}),
    "falcon_h1/normed": ("falcon_h1", "falcon-h1", {**FALCON_H1, "mamba_rms_norm": True}),
    "mamba2": (
        "mamba2",
        "mamba2",
        {"hidden_size": 96, "num_heads": 6, "head_dim": 32, "state_size": 32, "n_groups": 3},
    ),
    "jamba": (
        "jamba",
        "jamba",
        {
            **GRANITE,
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 32,
            "mamba_dt_rank": 32,
        },
    ),
    "jamba/dense": ("jamba", "jamba", {**GRANITE, **DENSE}),
    "mamba": ("mamba", "mamba", MAMBA_1),
    "falcon_mamba": ("falcon_mamba", "mamba", {**MAMBA_1, "tie_word_embeddings": False}),
}


def shared_of(config: Any) -> Keys:
    """Of all models that have attention, but for the heads of keys."""
    keys = {key: getattr(config, word, None) for key, word in KEYS.items() if key != "attention.key_length"}
    rope = getattr(config, "rope_parameters", None)
    return {**keys, "rope.freq_base": float(rope["rope_theta"])} if rope else keys


def of_granite(config: Any) -> Keys:
    names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
    names |= {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    names["expert_shared_feed_forward_length"] = "shared_intermediate_size"
    keys = {**shared_of(config), **{key: getattr(config, word, None) for key, word in names.items()}}
    return keys if getattr(config, "num_local_experts", 0) else {**keys, "expert_used_count": None}


def of_granite_hybrid(config: Any) -> Keys:
    keys = shared_of(config) if config.model_type == "bamba" else of_granite(config)
    return {
        **keys,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == FULL) for kind in config.layer_types],
        "rope.dimension_count": config.head_dim // 2,
        "rope.scaling.finetuned": config.model_type == "bamba",
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_d_head * config.mamba_n_heads,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def of_nemotron_h(config: Any) -> Keys:
    mixture, behind = "moe" in config.layers_block_type, config.num_nextn_predict_layers
    kinds = [*config.layers_block_type, *[FULL] * behind]
    keys = {
        **shared_of(config),
        "block_count": len(kinds),
        "feed_forward_length": [config.intermediate_size * (kind in ("moe", "mlp")) for kind in kinds],
        "attention.head_count_kv": [config.num_key_value_heads * (kind == FULL) for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if mixture:
        keys |= {
            **experts_of(config),
            "moe_latent_size": config.moe_latent_size,
            "nextn_predict_layers": behind or None,
        }
        keys["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
    return keys


def of_falcon_h1(config: Any) -> Keys:
    return {
        **of_granite_hybrid(config),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.scaling.finetuned": None,
        "rope.dimension_count": config.head_dim,
    }


def of_jamba(config: Any) -> Keys:
    kinds = config.layers_block_type
    return {
        **shared_of(config),
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "attention") for kind in kinds],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def of_mamba(config: Any) -> Keys:
    second = config.model_type == "mamba2"
    return {
        "context_length": 1 << 20,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.time_step_rank": config.num_heads if second else config.time_step_rank,
        "ssm.group_count": config.n_groups if second else None,
        "ssm.dt_b_c_rms": None if second else config.model_type == "falcon_mamba",
    }


FULL = "full_attention"
OWN_KEYS: Mapping[str, Callable[[Any], Keys]] = {
    "granitemoe": of_granite,
    "granitehybrid": of_granite_hybrid,
    "nemotron_h": of_nemotron_h,
    "nemotron_h_moe": of_nemotron_h,
    "falcon-h1": of_falcon_h1,
    "jamba": of_jamba,
    "mamba": of_mamba,
    "mamba2": of_mamba,
}
TURNED = (
    "granitemoe",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
)  # whose rows of queries and keys are in another order


def tensors_of(name: str, model: Any) -> Tensors:
    """With the names that llama.cpp's converter gives those which transformers calls otherwise by now."""
    architecture, config = MODELS[name][1], model.config
    if getattr(config, "num_nextn_predict_layers", 0):
        yield f"blk.{config.num_hidden_layers}.nextn.enorm.weight", torch.ones(config.hidden_size)
    names = names_of(architecture, config.num_hidden_layers)
    for own, tensor in apart(folded(model)):
        if own.endswith("shared_mlp.input_linear.weight"):
            end = "" if MODELS[name][2].get("num_local_experts") == 0 else "_shexp"
            for side, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"blk.{own.split('.')[2]}.ffn_{side}{end}.weight", half
            continue
        renamed = own
        for now, once in RENAMED.items():
            renamed = renamed.replace(now, once)
        renamed = renamed.replace("model.layers", "backbone.layers") if ".mixer." in renamed else renamed
        stored = names.get_name(renamed, (".weight", ".bias"))
        assert stored is not None, own
        if name == "granitehybrid/dense":
            stored = stored.replace("ffn_down_shexp", "ffn_down")
        yield stored, as_stored(stored, tensor, architecture, config)


def folded(model: Any) -> dict[str, Tensor]:
    """The model's tensors with Falcon H1's multipliers in them."""
    state, config = dict(model.state_dict()), model.config
    if config.model_type != "falcon_h1":
        return state
    groups = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads]
    parts = zip(config.ssm_multipliers, sizes, strict=True)
    times = {
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "mamba.in_proj.weight": config.ssm_in_multiplier
        * torch.cat([torch.full((size, 1), factor) for factor, size in parts]),
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    for name in state:
        factor = next((factor for end, factor in times.items() if name.endswith(f"{end}")), None)
        state[name] = state[name] if factor is None else state[name] * factor
    return state


RENAMED = {
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "block_sparse_moe.experts": "mlp.experts",
    "e_score_correction_bias": "e_score_correction.bias",
    "mixer.experts.up_proj": "mlp.experts.up_proj.weight",
    "mixer.experts.down_proj": "mlp.experts.down_proj",
    "mixer.dt_bias": "mixer.dt.bias",
    "mamba.dt_bias": "mamba.dt_proj.bias",
    "feed_forward.experts": "mlp.experts",
}


def as_stored(stored: str, tensor: Tensor, architecture: str, config: Any) -> Tensor:
    if architecture in TURNED and (".attn_q." in stored or ".attn_k." in stored):
        return interleaved(tensor, tensor.shape[0] // config.head_dim)
    if stored.endswith("ssm_a"):
        tensor = -tensor.exp()
    if stored.endswith(("ssm_a", "ssm_d")) and tensor.dim() == 1 and architecture not in ("jamba", "mamba"):
        return tensor[:, None]
    if "ssm_norm" in stored:
        return tensor.view(getattr(config, "mamba_n_groups", 0) or config.n_groups, -1)
    return tensor.squeeze() if "ssm_conv1d" in stored else tensor


def make(
    tmp_path: Path, name: str, kind: str, keys: Keys | None = None, tensors: Changes | None = None
) -> tuple[Path, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    model_type, architecture, changes = MODELS[name]
    source = make_model(tmp_path / "plain", model_type, **changes)
    model = theirs(source)
    said = {**OWN_KEYS[architecture](model.config), **(keys or {})}
    tied = {"output.weight": None} if model.config.tie_word_embeddings else {}
    held = {**dict(tensors_of(name, model)), **tied, **(tensors or {})}
    return source, written(tmp_path / "model.gguf", architecture, said, held, kind)


# What files have in weights, and layers that are left out.
NOT_SAID = {*MULTIPLIERS, "num_nextn_predict_layers"}
FAST = ["granitehybrid", "mamba"]  # vectors by groups; matrices of decays


@pytest.mark.parametrize(("name", "ranks"), in_rings(MODELS, FAST, [("granitehybrid", 2), ("nemotron_h_moe", 3)]))
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    source, file = make(tmp_path, name, "F32")
    plain = theirs(source)
    state = folded(plain)
    assert_model(converted(file), ranks, plain, {name: state[name] for name in held_by(plain)}, unsaid=NOT_SAID)


@pytest.mark.parametrize("name", in_lanes(MODELS, FAST, []))
def test_codes_are_kept(tmp_path: Path, name: str) -> None:
    _, file = make(tmp_path, name, "Q8_0")
    assert_codes(converted(file))


@natively
@pytest.mark.parametrize("name", in_lanes(MODELS, FAST, ["granitemoe", "granitehybrid/dense", "nemotron_h_moe"]))
def test_the_kernels_compute_with_the_codes(tmp_path: Path, name: str) -> None:
    _, file = make(tmp_path, name, "Q8_0")
    assert assert_as_near_as_own_codes(converted(file)).is_native == (MODELS[name][0] in LOWERED)


RMS: Keys = {"attention.layer_norm_rms_epsilon": 1e-5}
WRONG: list[Wrong] = [
    ("granitemoe", {"logit_scale": None}, {}, r"does not say granitemoe\.logit_scale"),
    ("granitemoe", {}, {"blk.1.ffn_gate_exps.weight": None}, r"no tensor blk\.1\.ffn_gate_exps\.weight"),
    ("granitemoe", {}, {"blk.1.ffn_gate_inp.weight": None}, r"no tensor .*layers\.1\.block_sparse_moe\.router"),
    ("granitemoe/shared", {}, {"blk.1.ffn_up_shexp.weight": None}, r"no tensor blk\.1\.ffn_up_shexp\.weight"),
    ("granitehybrid", {"ssm.inner_size": None}, {}, r"does not say granitehybrid\.ssm\.inner_size"),
    ("granitehybrid", {"ssm.state_size": None}, {}, r"does not say granitehybrid\.ssm\.state_size"),
    ("granitehybrid", {"attention.head_count_kv": [0, 3]}, {}, r"2 values of attention\.head_count_kv for 4 layers"),
    ("granitehybrid", {}, {"blk.2.ssm_a": None}, r"no tensor .*layers\.2\.mamba\.A_log"),
    (
        "granitehybrid",
        {},
        {"blk.2.ssm_norm.weight": torch.ones(2, 95)},
        r"layers\.2\.mamba\.norm\.weight has the shape",
    ),
    ("granitehybrid", {}, {"blk.2.ssm_in.weight": torch.ones(99, 96)}, r"layers\.2\.mamba\.in_proj\.weight has the sh"),
    ("bamba", {"rope.dimension_count": 32}, {}, r"turns 32 of 32 values of a head"),
    ("nemotron_h", {"attention.layer_norm_epsilon": None, **RMS}, {}, r"nemotron_h\.attention\.layer_norm_epsilon"),
    ("nemotron_h", {"feed_forward_length": [0, 96]}, {}, r"2 values of feed_forward_length for 4 layers"),
    ("nemotron_h", {}, {"blk.1.ffn_up.weight": None}, r"no tensor .*layers\.1\.mixer\.up_proj"),
    ("nemotron_h_moe", {"expert_used_count": [6] * 6}, {}, r"expert_used_count is a list"),
    ("nemotron_h_moe", {"expert_shared_feed_forward_length": None}, {}, r"moe\.expert_shared_feed_forward_length"),
    ("nemotron_h_moe", {}, {"blk.1.ffn_up_exps.weight": None}, r"no tensor blk\.1\.ffn_up_exps\.weight"),
    ("nemotron_h_moe", {}, {"blk.1.exp_probs_b.bias": None}, r"no tensor .*gate\.e_score_correction_bias"),
    ("nemotron_h_moe/latent", {}, {"blk.1.ffn_latent_up.weight": None}, r"no tensor .*layers\.1\.mixer\.fc2_latent"),
    ("falcon_h1", {"ssm.inner_size": None}, {}, r"does not say falcon-h1\.ssm\.inner_size"),
    ("falcon_h1", {}, {"blk.1.ffn_norm": None}, r"no tensor .*layers\.1\.pre_ff_layernorm"),
    ("falcon_h1/normed", {}, {"blk.1.ssm_norm.weight": None}, r"no tensor .*layers\.1\.mamba\.norm"),
    ("mamba2", {"ssm.group_count": None}, {}, r"does not say mamba2\.ssm\.group_count"),
    ("mamba2", {}, {"blk.1.ssm_d": torch.ones(5, 1)}, r"layers\.1\.mixer\.D has the shape"),
    ("jamba", {"attention.head_count_kv": [0, 3, 3, 0, 3]}, {}, r"layers 1, 2, 4 have attention \(attention"),
    ("jamba", {}, {"blk.3.ffn_gate_inp.weight": None}, r"no tensor .*layers\.3\.feed_forward\.router"),
    ("jamba", {}, {"blk.2.ssm_dt_norm.weight": None}, r"no tensor .*layers\.2\.mamba\.dt_layernorm"),
    ("mamba", {"ssm.time_step_rank": None}, {}, r"does not say mamba\.ssm\.time_step_rank"),
    ("mamba", {}, {"blk.1.ssm_a": torch.ones(192, 31)}, r"layers\.1\.mixer\.A_log has the shape"),
    ("bamba", {"rope.dimension_count": None}, {}, r"does not say granitehybrid\.rope\.dimension_count"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    assert_refused(file, message)

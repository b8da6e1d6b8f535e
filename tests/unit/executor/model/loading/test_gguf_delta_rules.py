"""GGUF files of models with delta rules: written from transformers' models in llama.cpp's layout, held against them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from services.executor.model.loading.loader import load_config
from tests.unit.executor.model.gguf_models import EXPERTS, KEYS, Tensors, apart, words, written
from tests.unit.executor.model.lanes import LOWERED, in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    assert_as_near_as_own_codes,
    assert_codes,
    assert_model,
    assert_refused,
    close,
    converted,
    held_by,
    load,
    theirs,
)
from tests.unit.executor.model.tiny import make_model

# Value heads of 32, as codes have groups: they can be cut and put in another order by heads.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_key_head_dim": 32,
}
DELTA = {
    **KEYS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def tiled(tensor: Tensor, config: Any, dim: int = 0, before: int = 0) -> Tensor:
    """Value heads of dimension `dim`, behind `before` rows: those of a key head apart instead of side by side."""
    rest = tensor.shape[dim] - before
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    order = [
        before + (key * (values // keys) + turn) * (rest // values) + at
        for turn in range(values // keys)
        for key in range(keys)
        for at in range(rest // values)
    ]
    return tensor.index_select(dim, torch.tensor([*range(before), *order]))


def of_qwen35(model: Any, config: Any, fused: bool) -> Tensors:
    number = gguf.MODEL_ARCH.QWEN35MOE if "moe" in config.model_type else gguf.MODEL_ARCH.QWEN35
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    behind_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    state = model.state_dict()
    for name, tensor in state.items() if fused else apart(state):
        name = f"{name}.weight" if name.endswith(("gate_up_proj", "experts.down_proj")) else name
        stored = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if "in_proj_qkv." in name or "conv1d" in name:
            tensor = tiled(tensor.squeeze(), config, before=behind_keys)
        elif any(word in name for word in ("in_proj_", "dt_bias", "A_log")):
            tensor = tiled(tensor, config)
        elif "out_proj" in name:
            tensor = tiled(tensor, config, dim=1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        yield stored, -tensor.exp() if "A_log" in name else tensor.flatten() if "gate_inp_shexp" in stored else tensor


def of_qwen3_next(model: Any, config: Any, older: bool) -> Tensors:
    """`older`: as the first programs wrote them, queries, keys, values and gates together."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3NEXT, config.num_hidden_layers)
    keys, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_dim = config.linear_num_value_heads // keys * config.linear_value_head_dim
    for name, tensor in apart(model.state_dict()):
        stored = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if "in_proj_qkvz" in name and not older:
            by_head = tensor.view(keys, -1, tensor.shape[-1]).split([key_dim, key_dim, value_dim, value_dim], dim=1)
            *mixed, gates = (part.reshape(-1, tensor.shape[-1]) for part in by_head)
            yield stored.replace("ssm_in", "attn_qkv"), torch.cat(mixed)
            yield stored.replace("ssm_in", "attn_gate"), gates
            continue
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        tensor = -tensor.exp() if "A_log" in name else tensor.squeeze() if "conv1d" in name else tensor
        yield stored, tensor.flatten() if "gate_inp_shexp" in stored else tensor


def of_kimi_linear(model: Any, config: Any, older: bool) -> Tensors:
    """`older`: keys and values of latents together."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, config.num_hidden_layers)
    heads, key_dim = config.num_attention_heads, config.qk_nope_head_dim

    def stored(name: str) -> str:
        inner = name.replace("forget_gate.", "").replace("dt_bias", "dt_proj.bias")
        found = names.get_name(inner.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    for name, tensor in apart(model.state_dict()):
        if "conv1d" in name:
            for side, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield stored(name.replace("conv1d", f"{side}_conv1d")), rows.view(1, -1, 1, rows.shape[-1])
        elif "kv_b_proj" in name and not older:
            keys, values = tensor.view(heads, -1, tensor.shape[-1]).split([key_dim, config.v_head_dim], dim=1)
            yield stored(name.replace("kv_b", "k_b")), keys.transpose(1, 2)
            yield stored(name.replace("kv_b", "v_b")), values
        else:
            yield stored(name), -tensor.exp() if "A_log" in name else tensor


def kimi_linear(source: Path, path: Path, kind: str, older: bool = False, without: str = "") -> Path:
    config = load_config(source)
    model = theirs(source)
    full = [kind == "full_attention" for kind in config.layer_types]
    keys = {
        **{key: getattr(config, name) for key, name in KEYS.items()},
        "attention.head_count_kv": [int(one) for one in full],
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 2,
        "attention.q_lora_rank": config.q_lora_rank or None,
    }
    held = dict(of_kimi_linear(model, config, older))
    return written(path, "kimi-linear", {**keys, without: None}, {**held, without: None}, kind)


def qwen35(
    source: Path, path: Path, kind: str, heads: int = 0, fused: bool = False, older: bool = False, without: str = ""
) -> Path:
    config = load_config(source)
    model = theirs(source)
    rope, next_ = config.rope_parameters, config.model_type == "qwen3_next"
    mixture = hasattr(config, "num_experts")
    keys = {
        **{key: getattr(config, name, None) for key, name in DELTA.items()},
        "block_count": config.num_hidden_layers + heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": float(rope["rope_theta"]),
        "nextn_predict_layers": heads or None,
        **(experts_of(config) if mixture else {}),
    }
    held = dict(of_qwen3_next(model, config, older) if next_ else of_qwen35(model, config, fused))
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + heads):
        held |= {f"blk.{layer}.attn_q.weight": torch.ones(64, 64), f"blk.{layer}.nextn.enorm.weight": torch.ones(64)}
    architecture = "qwen3next" if next_ else "qwen35moe" if mixture else "qwen35"
    return written(path, architecture, {**keys, without: None}, {**held, without: None}, kind)


experts_of = words({**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"})


WRITE: dict[str, Callable[..., Path]] = {
    "qwen3_5_text": qwen35,
    "qwen3_5_moe_text": qwen35,
    "qwen3_next": qwen35,
    "kimi_linear": kimi_linear,
}
KIMI: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "linear_num_heads": 3,
    "linear_head_dim": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
}
INTERVALS: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
}


def make(tmp_path: Path, model_type: str, kind: str, **how: Any) -> tuple[Path, Path]:
    """(transformers' model, the file)"""
    own = KIMI if model_type == "kimi_linear" else {}
    source = make_model(tmp_path / "plain", model_type, **{**SIZES, **INTERVALS, **own})
    return source, WRITE[model_type](source, tmp_path / "model.gguf", kind, **how)


FAST = ["qwen3_5_text"]


@pytest.mark.parametrize(
    ("model_type", "ranks"), in_rings(WRITE, FAST, [(name, two) for name in WRITE for two in (2, 3)])
)
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, model_type: str, ranks: int) -> None:
    source, file = make(tmp_path, model_type, "F32")
    assert_model(converted(file), ranks, theirs(source))


@pytest.mark.parametrize("model_type", in_lanes(WRITE, FAST))
def test_codes_are_kept(tmp_path: Path, model_type: str) -> None:
    _, file = make(tmp_path, model_type, "Q8_0")
    assert_codes(converted(file), ("kv_b_proj",))  # whose keys files have transposed


@natively
@pytest.mark.parametrize("model_type", in_lanes([name for name in WRITE if name in LOWERED], FAST))
def test_the_kernels_compute_with_the_codes(tmp_path: Path, model_type: str) -> None:
    _, file = make(tmp_path, model_type, "Q8_0")
    assert assert_as_near_as_own_codes(converted(file)).is_native


def test_heads_for_several_tokens_are_left_out(tmp_path: Path) -> None:
    source, file = make(tmp_path, "qwen3_5_text", "F32", heads=1)
    close(held_by(load(converted(file), torch.float32)), theirs(source).state_dict())


@pytest.mark.slow
def test_experts_may_have_gate_and_up_together(tmp_path: Path) -> None:
    source, file = make(tmp_path, "qwen3_5_moe_text", "Q8_0", fused=True)
    apart = qwen35(source, tmp_path / "apart" / "model.gguf", "Q8_0")
    for keep_codes in (False, True):
        models = [load(converted(one), torch.float32, keep_codes=keep_codes) for one in (file, apart)]
        close(held_by(models[0]), held_by(models[1]), within=0)
        for one in (file, apart):
            shutil.rmtree(one.with_name("linked"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear"])
def test_older_files_are_served(tmp_path: Path, model_type: str) -> None:
    source, file = make(tmp_path, model_type, "F32", older=True)
    close(held_by(load(converted(file), torch.float32)), theirs(source).state_dict())


MISSING = [
    ("qwen3_5_text", "ssm.inner_size", r"does not say qwen35\.ssm\.inner_size"),
    ("qwen3_5_text", "ssm.group_count", r"does not say qwen35\.ssm\.group_count"),
    ("qwen3_5_text", "rope.dimension_count", r"does not say qwen35\.rope\.dimension_count"),
    ("qwen3_5_text", "blk.0.ssm_a", r"have no tensor model\.layers"),
    ("qwen3_5_text", "blk.1.ssm_out.weight", r"have no tensor model\.layers"),
    ("qwen3_5_text", "blk.0.attn_gate.weight", r"have no tensor model\.layers"),
    ("kimi_linear", "attention.key_length_mla", r"does not say kimi-linear\.attention\.key_length_mla"),
    ("kimi_linear", "kda.head_dim", r"does not say kimi-linear\.kda\.head_dim"),
    ("kimi_linear", "expert_gating_func", r"does not say kimi-linear\.expert_gating_func"),
    ("kimi_linear", "blk.2.attn_k_b.weight", r"has no tensor blk\.2\.attn_k_b\.weight"),
    ("kimi_linear", "blk.0.ssm_conv1d_k.weight", r"has no tensor blk\.0\.ssm_conv1d_k\.weight"),
    ("qwen3_next", "blk.0.attn_gate.weight", r"has no tensor blk\.0\.attn_gate\.weight"),
    ("qwen3_next", "blk.1.attn_qkv.weight", r"has no tensor blk\.1\.attn_qkv\.weight"),
]


@pytest.mark.parametrize(
    ("model_type", "missing", "message"), in_lanes(MISSING, [case for case in MISSING if case[0] in FAST])
)
def test_what_is_missing_is_named(tmp_path: Path, model_type: str, missing: str, message: str) -> None:
    _, file = make(tmp_path, model_type, "F32", without=missing)
    assert_refused(file, message)

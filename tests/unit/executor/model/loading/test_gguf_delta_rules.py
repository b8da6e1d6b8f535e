"""GGUF files of models with delta rules: written from transformers' models in llama.cpp's layout, held against them."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.executor.model.loading.loader import load_config
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.quantized import QuantizedRows
from services.executor.native.library import why_not
from shared.errors import ModelLoadError
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.gguf_models import add_tokens, apart, stored_as
from tests.unit.executor.model.lanes import LOWERED, in_lanes, in_rings
from tests.unit.executor.model.loading.gguf_checks import assert_logits, assert_settings
from tests.unit.executor.model.loading.test_gguf_weights import converted, load, values_of
from tests.unit.executor.model.ring import mixed_script
from tests.unit.executor.model.tiny import make_model, reference_logits

# Value heads of 32, as codes have groups: they can be cut and put in another order by heads.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_key_head_dim": 32,
}
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
DELTA = {
    **KEYS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
Tensors = Iterator[tuple[str, Tensor]]  # by the file's names


def written(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Tensors,
    kind: str,
    leave_out: tuple[str, ...] = (),
    tokenizer: Callable[[gguf.GGUFWriter, int], None] = add_tokens,
) -> Path:
    """The file `path`: `keys` behind the architecture's name, matrices of type `kind`."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        if key in leave_out:
            continue
        if isinstance(value, list):
            writer.add_array(key if key.startswith("xielu.") else f"{architecture}.{key}", value)
        else:
            add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[
                type(value)
            ]
            add(f"{architecture}.{key}", value)
    for name, tensor in tensors:
        if name in leave_out:
            continue
        if name == "token_embd.weight":
            tokenizer(writer, tensor.shape[0])
        is_matrix = tensor.dim() > 1 and not any(word in name for word in ("conv1d", "ffn_gate_inp", "norm"))
        type_ = gguf.GGMLQuantizationType[kind if is_matrix and tensor.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(name, stored_as(tensor.float().contiguous().numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def kimi_linear(source: Path, path: Path, kind: str, older: bool = False, leave_out: tuple[str, ...] = ()) -> Path:
    config = load_config(source)
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
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
    }
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    return written(path, "kimi-linear", keys, of_kimi_linear(model, config, older), kind, leave_out)


def qwen35(
    source: Path,
    path: Path,
    kind: str,
    heads: int = 0,
    fused: bool = False,
    older: bool = False,
    leave_out: tuple[str, ...] = (),
) -> Path:
    config = load_config(source)
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    rope, next_ = config.rope_parameters, config.model_type == "qwen3_next"
    mixture = hasattr(config, "num_experts")
    keys = {
        **{key: value for key, name in DELTA.items() if (value := getattr(config, name, None)) is not None},
        "block_count": config.num_hidden_layers + heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if heads:
        keys["nextn_predict_layers"] = heads
    if mixture:
        keys |= experts_of(config)

    def tensors() -> Tensors:
        yield from of_qwen3_next(model, config, older) if next_ else of_qwen35(model, config, fused)
        for head in range(heads):
            layer = config.num_hidden_layers + head
            yield f"blk.{layer}.attn_q.weight", torch.ones(64, 64)
            yield f"blk.{layer}.nextn.enorm.weight", torch.ones(64)

    architecture = "qwen3next" if next_ else "qwen35moe" if mixture else "qwen35"
    return written(path, architecture, keys, tensors(), kind, leave_out)


def experts_of(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


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


def held_by(model: Any) -> dict[str, Tensor]:
    """Parameters and what is learned beside them: corrections of a router."""
    found = values_of(model)
    return found | {name: tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias")}


def close(found: dict[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected[name].float(), rtol=0, atol=within), name


FAST = ["qwen3_5_text"]


@pytest.mark.parametrize(
    ("model_type", "ranks"), in_rings(WRITE, FAST, [(name, two) for name in WRITE for two in (2, 3)])
)
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, model_type: str, ranks: int) -> None:
    source, file = make(tmp_path, model_type, "F32")
    made = converted(file)
    plain = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    close(held_by(load(made, torch.float32)), plain.state_dict())
    assert_settings(made, load_config(source))
    assert_logits(made, ranks, partial(reference_logits, source))


@pytest.mark.parametrize("model_type", in_lanes(WRITE, FAST))
def test_codes_are_kept(tmp_path: Path, model_type: str) -> None:
    _, file = make(tmp_path, model_type, "Q8_0")
    made = converted(file)
    model = load(made, torch.float32, keep_codes=True)
    held = {name for name, module in model.named_modules() if isinstance(module, WeightShard)}
    kept = {name for name in held if isinstance(model.get_submodule(name).stored, QuantizedRows)}
    assert held - kept == {name for name in held if "kv_b_proj" in name}  # whose keys files have transposed
    close(held_by(model), held_by(load(made, torch.float32)))
    later = load(made, torch.float32, keep_codes=True, defer_codes=True)
    close(held_by(later), held_by(model), within=0)


@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
@pytest.mark.parametrize("model_type", in_lanes([name for name in WRITE if name in LOWERED], FAST))
def test_the_kernels_compute_with_the_codes(tmp_path: Path, model_type: str) -> None:
    _, file = make(tmp_path, model_type, "Q8_0")
    made = converted(file)
    plain = load(made, torch.float32)
    unpacked = tmp_path / "unpacked"
    transformed = AutoModelForCausalLM.from_config(plain.config, dtype=torch.float32)
    transformed.load_state_dict(held_by(plain))
    transformed.save_pretrained(str(unpacked))
    expected = truth(unpacked, mixed_script()[0].sequences)
    runner = runner_of(made, native=True)
    assert runner.is_native
    # Products round activations to int8, as they do for the same values in codes of our own; heads in another order
    # are ten times as far off.
    ours = runner_of(unpacked, native=True, weights="q8_0")
    assert errors(runner, expected).mean() < 1.3 * errors(ours, expected).mean()


def test_heads_for_several_tokens_are_left_out(tmp_path: Path) -> None:
    source, file = make(tmp_path, "qwen3_5_text", "F32", heads=1)
    plain = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    close(held_by(load(converted(file), torch.float32)), plain.state_dict())


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
    plain = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    close(held_by(load(converted(file), torch.float32)), plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("qwen3_next", "blk.0.attn_gate.weight"),
        ("qwen3_next", "blk.1.attn_qkv.weight"),
        ("kimi_linear", "blk.2.attn_k_b.weight"),
        ("kimi_linear", "blk.0.ssm_conv1d_k.weight"),
    ],
)
def test_parts_that_are_not_there_are_named(tmp_path: Path, model_type: str, missing: str) -> None:
    _, file = make(tmp_path, model_type, "F32", leave_out=(missing,))
    made = converted(file)
    with pytest.raises(ModelLoadError, match=f"has no tensor {re.escape(missing)}"):
        load(made, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["attention.key_length_mla", "kda.head_dim", "expert_gating_func"])
def test_keys_of_latent_attention_that_are_not_there_are_named(tmp_path: Path, missing: str) -> None:
    _, file = make(tmp_path, "kimi_linear", "F32", leave_out=(missing,))
    with pytest.raises(ModelLoadError, match=rf"does not say kimi-linear\.{missing}"):
        converted(file)


@pytest.mark.parametrize("missing", ["ssm.inner_size", "ssm.group_count", "rope.dimension_count"])
def test_keys_that_are_not_there_are_named(tmp_path: Path, missing: str) -> None:
    _, file = make(tmp_path, "qwen3_5_text", "F32", leave_out=(missing,))
    with pytest.raises(ModelLoadError, match=rf"does not say qwen35\.{missing}"):
        converted(file)


@pytest.mark.parametrize("missing", ["blk.0.ssm_a", "blk.1.ssm_out.weight", "blk.0.attn_gate.weight"])
def test_tensors_that_are_not_there_are_refused(tmp_path: Path, missing: str) -> None:
    _, file = make(tmp_path, "qwen3_5_text", "F32", leave_out=(missing,))
    made = converted(file)
    with pytest.raises(ModelLoadError, match=r"have no tensor model\.layers"):
        load(made, torch.float32)

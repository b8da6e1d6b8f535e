"""Models whose checkpoints are quantized: their logits against transformers' with what the codes stand for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.conversion.convert import convert
from services.executor.model.loading.loader import load_config, load_model, unpack
from services.executor.model.loading.reading import Progress
from services.executor.model.parallel.layers import WeightShard, expert_weight_of
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import CODECS
from shared.errors import ModelLoadError
from tests.unit.executor.cpu.test_decoder import errors, holds_codes, runner_of, truth
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.loading.quantized_weights import FORMS, Write, fp8, mxfp4
from tests.unit.executor.model.ring import CPU, in_shared_memory, make_runner, mixed_script, on_ring
from tests.unit.executor.model.tiny import build, make_model, reference_logits

SIZES = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 5, "num_key_value_heads": 5}
SIZES |= {"head_dim": 32, "num_hidden_layers": 2}
"""Of inner widths that two and three ranks do not share equally."""


@dataclass(frozen=True)
class Checkpoint:
    """The same model twice."""

    plain: Path
    quantized: Path


def make_checkpoint(directory: Path, model_type: str, write: Write, **changes: Any) -> Checkpoint:
    """Of random weights; the linear layers' are quantized, head, embedding and norms are not."""
    plain = make_model(directory / "plain", model_type, **{**SIZES, **changes})
    made = np.random.default_rng(0)
    values, stored, settings = load_file(plain / "model.safetensors"), {}, {}
    for name in list(values):
        if name.endswith("_proj.weight"):
            written = write(made, *values[name].shape)
            values[name] = torch.from_numpy(written.values).contiguous()
            base = name.removesuffix("weight")
            stored |= {base + part: tensor for part, tensor in written.tensors.items()}
            settings = written.settings
        else:
            stored[name] = values[name]
    return saved(plain, directory / "quantized", values, stored, settings)


def saved(
    plain: Path, quantized: Path, values: dict[str, Tensor], stored: dict[str, Tensor], settings: dict[str, Any]
) -> Checkpoint:
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return Checkpoint(plain, quantized)


def worst(checkpoint: Checkpoint, ranks: int) -> float:
    """The largest error of a logit of the unpacked model in fp32, over a script of prefills and decodes."""
    expected = reference_logits(checkpoint.plain, mixed_script()[0].sequences)
    assert expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"

    def work(collectives: Collectives) -> Tensor:
        return errors(make_runner(checkpoint.quantized, collectives), expected)

    return float(on_ring(ranks, work)[0].max())


SOME = [*FORMS][::5]  # forms for `make test`; what is read of each form is held by test_quantized_tensors.py
EITHER = in_lanes([2, 3], [3], [])


@pytest.mark.parametrize(
    ("form", "ranks"),
    in_lanes(
        ((form, 1 + index % 3) for index, form in enumerate(FORMS)),
        [(form, 1 + 5 * index % 3) for index, form in enumerate(SOME)],
    ),
)
def test_unpacked_they_compute_what_transformers_computes(tmp_path: Path, form: str, ranks: int) -> None:
    model_type = ["llama", "qwen2"][len(form) % 2]
    assert worst(make_checkpoint(tmp_path, model_type, FORMS[form]), ranks) < 2e-4


@pytest.mark.parametrize("ranks", EITHER)
def test_fused_projections(tmp_path: Path, ranks: int) -> None:
    assert worst(make_checkpoint(tmp_path, "phi3", FORMS["gptq"], pad_token_id=0), ranks) < 2e-4


@pytest.mark.parametrize("ranks", EITHER)
@pytest.mark.parametrize("form", ["fp8 by blocks", "awq"])
def test_experts_one_by_one(tmp_path: Path, form: str, ranks: int) -> None:
    changes = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    assert worst(make_checkpoint(tmp_path, "qwen3_moe", FORMS[form], **changes), ranks) < 2e-4


def gpt_oss(tmp_path: Path, **changes: Any) -> Checkpoint:
    plain = make_model(tmp_path / "plain", "gpt_oss", hidden_size=64, intermediate_size=96, **changes)
    made = np.random.default_rng(0)
    values, stored = load_file(plain / "model.safetensors"), {}
    for name, value in list(values.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written = mxfp4(made, value.shape[0], value.shape[2], value.shape[1])
            values[name] = torch.from_numpy(written.values).transpose(1, 2).contiguous()
            stored |= {name + part: tensor for part, tensor in written.tensors.items()}
        else:
            stored[name] = value
    return saved(plain, tmp_path / "quantized", values, stored, {"quant_method": "mxfp4"})


@pytest.mark.parametrize("ranks", EITHER)
def test_experts_of_gpt_oss(tmp_path: Path, ranks: int) -> None:
    assert worst(gpt_oss(tmp_path), ranks) < 2e-4


@natively
@pytest.mark.parametrize("ranks", in_lanes([1, 2, 3], [1], [2]))
def test_experts_of_gpt_oss_stay_codes(tmp_path: Path, ranks: int) -> None:
    checkpoint = gpt_oss(tmp_path, head_dim=32)
    expected = truth(checkpoint.plain, mixed_script()[0].sequences)

    def work(ring: Collectives) -> Tensor:
        runner = runner_of(checkpoint.quantized, native=True, collectives=ring)
        experts = runner.packed.layers[-1].experts
        assert holds_codes(experts.gate_up)
        assert holds_codes(experts.down)
        return errors(runner, expected)

    found = in_shared_memory(ranks, work)[0]
    assert found.mean() < 0.1 * torch.stack([row.std() for row in expected]).mean()


@pytest.mark.parametrize("later", [False, True])
def test_codes_of_gpt_oss_are_put_back_where_its_modules_compute(tmp_path: Path, later: bool) -> None:
    checkpoint = gpt_oss(tmp_path)
    model = load(checkpoint.quantized, later=later)
    held = expert_weight_of(model.model.layers[1].mlp.experts, "gate_up_proj")
    assert isinstance(held, DeferredRows if later else QuantizedRows)
    unpack(model, torch.bfloat16)
    for name, value in load_file(checkpoint.plain / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), value.bfloat16()), name


@natively
@pytest.mark.parametrize(("form", "packed"), [("awq", True), ("gptq act-order", False), ("fp8 by blocks", True)])
def test_codes_of_experts_stay_codes_where_they_have_one_format(tmp_path: Path, form: str, packed: bool) -> None:
    changes = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", FORMS[form], **changes)
    runner = runner_of(checkpoint.quantized, native=True)
    experts = runner.packed.layers[-1].experts
    assert [holds_codes(experts.gate_up), holds_codes(experts.down)] == [packed, packed]
    expected = truth(checkpoint.plain, mixed_script()[0].sequences)
    spread = torch.stack([row.std() for row in expected]).mean()
    assert errors(runner, expected).mean() < 0.1 * spread


@natively
@pytest.mark.parametrize("form", in_lanes(FORMS, SOME))
def test_codes_stay_codes_in_the_native_kernels(tmp_path: Path, form: str) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS[form])
    runner = runner_of(checkpoint.quantized, native=True)
    assert all(map(holds_codes, runner.packed.layers[0].down.parts))
    assert holds_codes(runner.packed.layers[0].qkv)
    expected = truth(checkpoint.plain, mixed_script()[0].sequences)
    spread = torch.stack([row.std() for row in expected]).mean()
    # What int8 activations add is as much as int8 weights do; bf16 weights of the reference are rounded too.
    assert errors(runner, expected).mean() < 0.05 * spread


@natively
@pytest.mark.parametrize(
    "form", in_lanes(["gptq act-order", "awq", "int8 per channel", "fp8 by blocks", "nf4"], ["awq"])
)
@pytest.mark.parametrize("ranks", EITHER)
def test_ranks_read_their_cuts_of_codes(tmp_path: Path, ranks: int, form: str) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS[form])
    expected = truth(checkpoint.plain, mixed_script()[0].sequences)

    def work(ring: Collectives) -> Tensor:
        runner = runner_of(checkpoint.quantized, native=True, collectives=ring)
        assert holds_codes(runner.packed.layers[0].down)
        return errors(runner, expected)

    found = in_shared_memory(ranks, work)[0]
    spread = torch.stack([row.std() for row in expected]).mean()
    assert found.mean() < 0.05 * spread


def load(
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    weights: str = "",
    report: Progress = lambda *_: None,
    *,
    later: bool = False,
    of: tuple[int, int] = (1, 0),
) -> Any:
    layout = ShardLayout.from_config(load_config(directory), *of)
    codec = CODECS[weights] if weights else None
    how = {"keep_codes": True, "defer_codes": later}
    return load_model(directory, dtype, layout, SingleRank(), CPU, report, codec, **how)


@pytest.mark.parametrize("of", [(3, 1)])
@pytest.mark.parametrize("form", in_lanes(FORMS, SOME))
def test_codes_that_are_read_later_are_the_same(tmp_path: Path, form: str, of: tuple[int, int]) -> None:
    """A few rows at a time, with the files closed."""
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS[form])
    told: list[tuple[int, int]] = []
    held = [module for module in load(checkpoint.quantized, of=of).modules() if isinstance(module, WeightShard)]
    model = load(checkpoint.quantized, report=lambda *now: told.append(now), later=True, of=of)
    later = [module for module in model.modules() if isinstance(module, WeightShard)]
    assert any(isinstance(module.stored, DeferredRows) for module in later)
    for now, then in zip(held, later, strict=True):
        codes, deferred = now.stored, then.stored
        assert isinstance(codes, QuantizedRows) is isinstance(deferred, DeferredRows)
        if not isinstance(codes, QuantizedRows) or not isinstance(deferred, DeferredRows):
            continue
        assert deferred.shape == codes.shape
        for first in range(0, codes.outputs, 32):
            end = min(first + 32, codes.outputs)
            some = deferred.rows(first, end).read()
            assert some.same_format(deferred.like)
            assert some.same_format(codes)
            assert torch.equal(some.codes, codes.codes[first:end])
            assert torch.equal(some.dequantized(), codes.rows(first, end).dequantized())
    assert told == sorted(told), "what is read later counts when it is read"
    assert told[-1][0] > 0.99 * told[-1][1]


def test_damage_that_is_found_later_is_said(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", FORMS["gptq"]).quantized / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.1.self_attn.o_proj.scales"][1, 2] = float("nan")
    save_file(stored, path)
    weight = load(path.parent, later=True).model.layers[1].self_attn.o_proj.stored
    with pytest.raises(ModelLoadError, match=r"1.self_attn.o_proj.weight cannot be read \(.*NaN or infinite"):
        weight.read()


def test_what_has_no_product_is_unpacked_and_the_log_says_so(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", lambda *sizes: fp8(*sizes, block=24))
    with capture_logs() as logs:
        model = load(checkpoint.quantized)
    assert isinstance(model.model.layers[0].mlp.down_proj.stored, Tensor)
    [line] = [line for line in logs if line["event"] == "weights_unpacked"]
    assert line["tensors"]["model.layers.*.mlp.down_proj.weight"] == SIZES["num_hidden_layers"]


def test_models_that_pytorch_computes_are_unpacked(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS["gptq"])
    model = load(checkpoint.quantized)
    linear = model.model.layers[0].mlp.down_proj
    assert isinstance(linear.stored, QuantizedRows)
    unpack(model, torch.float32)
    expected = load_file(checkpoint.plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(linear.weight, expected)


@pytest.mark.parametrize(("dtype", "bits"), [("int4-g32", 4), ("int8", 8)])
def test_what_the_converter_writes_is_read(tmp_path: Path, dtype: str, bits: int) -> None:
    plain = make_model(tmp_path / "plain", "llama", **SIZES)
    convert(plain, tmp_path / "made", "safetensors", dtype, lambda *_: None)
    name = "model.layers.0.mlp.down_proj"
    held = load(tmp_path / "made").get_submodule(name).stored
    assert isinstance(held, QuantizedRows)
    assert held.bits == bits
    weight = load_file(plain / "model.safetensors")[f"{name}.weight"]
    assert (held.dequantized() - weight).square().mean() < 0.01 * weight.square().mean()


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS["awq"])
    with pytest.raises(ModelLoadError, match="quantized already, and --weight-dtype would quantize it to q4_k again"):
        load(checkpoint.quantized, weights="q4_k")


def test_biases_of_zeros_that_a_quantizer_has_added_are_passed_over(tmp_path: Path) -> None:
    quantized = make_checkpoint(tmp_path, "llama", FORMS["gptq"]).quantized / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.bias"
    stored = {**load_file(quantized), name: torch.zeros(SIZES["hidden_size"])}
    save_file(stored, quantized)
    load(quantized.parent)
    save_file({**stored, name: torch.ones(SIZES["hidden_size"])}, quantized)
    with pytest.raises(ModelLoadError, match=f"hold a tensor {name} that the architecture does not use"):
        load(quantized.parent)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_size": 64}, r"down_proj.weight cannot be read \(its 288 inputs do not divide into groups of 64"),
        ({"bits": 8}, r"q_proj.weight has the shape \[160, 80\]|cannot be read"),
        ({"quant_method": "awq", "version": "gemm"}, "cannot be read"),
        ({"quant_method": "fp8"}, "the architecture does not use|no tensor"),
    ],
)
def test_configurations_that_lie_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = make_checkpoint(tmp_path, "llama", FORMS["gptq"]).quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        load(path.parent)


def test_scales_that_are_no_numbers_are_refused_with_the_name_of_the_weight(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", FORMS["gptq"]).quantized / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.1.self_attn.o_proj.scales"][1, 2] = float("nan")
    save_file(stored, path)
    with pytest.raises(
        ModelLoadError, match=r"model.layers.1.self_attn.o_proj.weight cannot be read \(.*NaN or infinite"
    ):
        load(path.parent)


def test_the_fp8_of_deepseek_v4_is_read(tmp_path: Path) -> None:
    """Under its own names, with powers of two for scales."""
    model = build("deepseek_v4", settings_of("deepseek_v4"))
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    for directory in (plain, coded):
        model.save_pretrained(str(directory))
    made, values = np.random.default_rng(0), load_file(plain / "model.safetensors")
    stored = dict(values)
    linear = (".w1.weight", ".w2.weight", ".w3.weight", ".wq_b.weight", ".wkv.weight", ".wo_a.weight", ".wo_b.weight")
    for name in values:
        if name.endswith(linear) and "compressor" not in name:
            outputs, inputs = values[name].shape
            codes = fp8(made, outputs, inputs, block=16).tensors["weight"]
            shape = (-(-outputs // 16), -(-inputs // 16))
            scales = torch.from_numpy(made.integers(122, 125, shape).astype(np.uint8)).view(torch.float8_e8m0fnu)
            wide = scales.float().repeat_interleave(16, 0)[:outputs].repeat_interleave(16, 1)[:, :inputs]
            values[name] = codes.float() * wide
            stored |= {name: codes, name.removesuffix("weight") + "scale": scales}
    save_file(values, plain / "model.safetensors")
    save_file(stored, coded / "model.safetensors")
    path = coded / "config.json"
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    config = {**json.loads(path.read_text()), "quantization_config": settings}
    path.write_text(json.dumps(config))
    expected, found = (make_runner(directory, SingleRank()) for directory in (plain, coded))
    for plan, _ in mixed_script()[1]:
        wanted, logits = expected.forward(plan), found.forward(plan)
        if wanted is not None and logits is not None:
            assert torch.equal(wanted, logits)
    path.write_text(json.dumps({**config, "expert_dtype": "fp4"}))
    with pytest.raises(ModelLoadError, match="experts in fp4"):
        make_runner(coded, SingleRank())

"""A model with an adapter merged into it says what PEFT's merged model says, from whatever files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.executor.model.conversion.__main__ import main
from services.executor.model.conversion.convert import convert
from services.executor.model.conversion.merging import dtype_of
from shared.errors import ModelLoadError
from tests.unit.executor.model.conversion.conftest import MakeModel
from tests.unit.executor.model.conversion.test_convert import TOKENS, gguf_logits, ignore
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in
from tests.unit.executor.model.tiny import reference_logits


def adapted(source: Path, directory: Path) -> torch.Tensor:
    """Saves an adapter for the model in `source`; the logits of both together, by PEFT."""
    merged = save_adapter(base_of(source), directory, targets_in(source), rank=4)
    with torch.inference_mode():
        return merged(torch.tensor(TOKENS), use_cache=False).logits[0]


def test_merged_weights_compute_what_base_and_adapter_do(model_of: MakeModel, tmp_path: Path) -> None:
    source, adapter = model_of("llama"), tmp_path / "adapter"
    expected = adapted(source, adapter)
    plain = reference_logits(source, TOKENS)[0]
    assert (expected - plain).abs().max() > 0.05, "an adapter that changes nothing proves nothing"

    convert(source, tmp_path / "merged", "safetensors", "f32", ignore, adapter=adapter)
    assert torch.allclose(reference_logits(tmp_path / "merged", TOKENS)[0], expected, atol=1e-5)
    convert(source, tmp_path / "merged.gguf", "gguf", "f32", ignore, adapter=adapter)
    assert torch.allclose(gguf_logits(tmp_path / "merged.gguf"), expected, atol=1e-4)
    convert(source, tmp_path / "plain", "safetensors", "f32", ignore)
    assert torch.equal(reference_logits(tmp_path / "plain", TOKENS)[0], plain)


def test_codes_are_merged_as_the_values_that_serving_has(model_of: MakeModel, tmp_path: Path) -> None:
    """Base and adapter of a quantized model: the adapter is added to what the codes stand for."""
    coded, values, adapter = tmp_path / "coded", tmp_path / "values", tmp_path / "adapter"
    convert(model_of("llama", hidden_size=96, num_attention_heads=6), coded, "safetensors", "int4-g32", ignore)
    convert(coded, values, "safetensors", "f32", ignore)
    expected = adapted(values, adapter)
    convert(coded, tmp_path / "merged", "safetensors", "f32", ignore, adapter=adapter)
    assert torch.allclose(reference_logits(tmp_path / "merged", TOKENS)[0], expected, atol=1e-4)


def test_a_gguf_base_is_merged_in_its_own_order_of_rows(model_of: MakeModel, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source, adapter = model_of("llama", rope_parameters=rope), tmp_path / "adapter"
    expected = adapted(source, adapter)
    convert(source, tmp_path / "base.gguf", "gguf", "f32", ignore)
    for to, name in (("safetensors", "merged"), ("gguf", "merged.gguf")):
        convert(tmp_path / "base.gguf", tmp_path / name, to, "f32", ignore, adapter=adapter)
    convert(tmp_path / "merged.gguf", tmp_path / "back", "safetensors", "f32", ignore)
    for name in ("merged", "back"):
        assert torch.allclose(reference_logits(tmp_path / name, TOKENS)[0], expected, atol=1e-4)


def test_weights_are_written_as_the_base_has_them(
    model_of: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, adapter = model_of("llama", hidden_size=96, num_attention_heads=6), tmp_path / "adapter"
    adapted(source, adapter)
    convert(source, tmp_path / "half", "safetensors", "f16", ignore)
    convert(source, tmp_path / "coded.gguf", "gguf", "q8_0", ignore)
    assert dtype_of(source) == ("f32", "")
    assert dtype_of(tmp_path / "half") == ("f16", "")
    assert dtype_of(tmp_path / "coded.gguf") == ("bf16", "Q8_0")

    arguments = ["convert", str(tmp_path / "half"), str(tmp_path / "merged"), "--to", "safetensors"]
    assert main([*arguments, "--adapter", str(adapter)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]
    assert (result["dtype"], result["codes"]) == ("f16", "")
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.float16}


def test_what_cannot_be_merged_is_told(model_of: MakeModel, tmp_path: Path) -> None:
    source, adapter = model_of("llama"), tmp_path / "adapter"
    adapted(source, adapter)
    other = model_of("qwen2", hidden_size=64)
    with pytest.raises(ModelLoadError, match="the adapter is of another model"):
        convert(other, tmp_path / "out", "safetensors", "f32", ignore, adapter=adapter)
    experts, of_experts = model_of("mixtral"), tmp_path / "of-experts"
    adapted(experts, of_experts)
    with pytest.raises(ModelLoadError, match=r"changes experts .*, which are not merged here"):
        convert(experts, tmp_path / "out", "safetensors", "f32", ignore, adapter=of_experts)
    with pytest.raises(ModelLoadError, match=r"has no adapter_config\.json"):
        convert(source, tmp_path / "out", "safetensors", "f32", ignore, adapter=tmp_path)
    assert not (tmp_path / "out").exists()

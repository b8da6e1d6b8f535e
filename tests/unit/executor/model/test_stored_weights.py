"""What a model's card says of the form of its weights."""

from pathlib import Path
from typing import Any

import pytest

from services.executor.model.card import stored_as
from shared.models import link_gguf


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF Q4_1"),
        ("model-q4_k_m.gguf", "GGUF Q4_K_M"),
        ("Big-IQ2_XXS-00001-of-00002.gguf", "GGUF IQ2_XXS"),
        ("some.bf16.gguf", "GGUF BF16"),
        ("plain.gguf", "GGUF"),
    ],
)
def test_a_gguf_file_says_how_it_is_quantized_by_its_name(tmp_path: Path, name: str, expected: str) -> None:
    made = tmp_path / "model"
    made.mkdir()
    file = tmp_path / name
    file.touch()
    if "00001" in name:
        (tmp_path / name.replace("00001", "00002", 1)).touch()
    link_gguf(made, file)
    assert stored_as(made, {"dtype": "float32"}) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "BF16"),
        ({"text_config": {"torch_dtype": "float16"}}, "F16"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        ({}, ""),
    ],
)
def test_safetensors_say_it_in_their_configuration(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    assert stored_as(tmp_path, config) == expected

"""Models that take more than text: what of them is read, and which are refused. Their logits: test_architectures.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from services.executor.model.conversion.convert import open_model
from services.executor.model.loading.loader import load_config
from services.executor.model.loading.text_models import text_config, text_names, whole_of
from shared.errors import ModelLoadError


def text_of(**described: Any) -> Any:
    config = CONFIG_MAPPING["gemma3"](**described)
    return text_config(config, described)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("visual.blocks.0.mlp.up_proj.weight", None),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.vision_tower.layers.0.mlp.up_proj.weight", None),
        ("multi_modal_projector.weight", None),
    ],
)
def test_tensors_of_the_text_model(name: str, own: str | None) -> None:
    assert text_names(text_of(), [name]) == ({} if own is None else {name: own})


def test_a_text_model_has_all_tensors() -> None:
    assert text_names(CONFIG_MAPPING["llama"](), ["a", "b"]) == {"a": "a", "b": "b"}


@pytest.mark.parametrize(
    ("described", "tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
    ],
)
def test_the_whole_says_whether_the_head_is_tied(described: dict[str, Any], tied: bool) -> None:
    assert text_of(**described).tie_word_embeddings is tied


def test_type_and_quantization_are_those_of_the_whole() -> None:
    text = text_of(dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    assert text.dtype in ("bfloat16", torch.bfloat16)
    assert text.quantization_config == {"quant_method": "fp8"}
    assert whole_of(text) == "gemma3"


def test_a_text_model_of_a_type_of_its_own_is_the_type_it_equals() -> None:
    described = {"text_config": {"rope_parameters": {"rope_theta": 5e6, "mrope_section": [4, 2, 2]}}}
    text = text_config(CONFIG_MAPPING["qwen3_vl"](**described), described)
    assert text.model_type == "qwen3"
    assert text.rope_parameters == {"rope_theta": 5e6, "rope_type": "default"}


def test_other_models_that_take_more_than_text_are_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["paligemma"]().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"more than text \('paligemma'\).* or one of aria, "):
        load_config(tmp_path)


def test_a_configuration_may_be_its_text_models_too(tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 3, "dtype": "bfloat16", "tie_word_embeddings": True}
    CONFIG_MAPPING["phi4_multimodal"](**settings).save_pretrained(tmp_path)
    text = load_config(tmp_path)
    assert (text.model_type, text.num_hidden_layers, text.tie_word_embeddings) == ("phi3", 3, True)
    assert text.dtype == torch.bfloat16
    own = "model.layers.0.mlp.down_proj.weight"
    assert text_names(text, [own, "model.embed_tokens_extend.image_embed.img_projection_up.bias"]) == {own: own}


def test_what_takes_more_than_text_is_not_converted(tmp_path: Path) -> None:
    CONFIG_MAPPING["gemma3"]().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"'gemma3'.* is not converted"), open_model(tmp_path):
        pass

"""Configurations that no model can have are refused in one sentence, and those of every model are not."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from services.executor.core.sharding import ShardLayout
from services.executor.families.registry import DECODERS
from services.executor.model.catalogue import REFUSED, check_supported, longest_context
from services.executor.model.configuration import check_configuration
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config
from shared.errors import ModelLoadError, RyzansteinError
from tests.unit.executor.model.architectures import settings_of

QWEN = {"model_type": "qwen3_next"}
DEEPSEEK = {"model_type": "deepseek_v32"}


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        (QWEN | {"linear_num_value_heads": 30}, "linear_num_value_heads is 30, and must be a multiple of its"),
        (QWEN | {"linear_num_key_heads": 0}, "linear_num_key_heads is 0, and must be from 1 to 65536"),
        (QWEN | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, and must be from 1 to 1024"),
        (QWEN | {"linear_conv_kernel_dim": 10**9}, "linear_conv_kernel_dim is 1000000000"),
        (QWEN | {"linear_key_head_dim": -1}, "linear_key_head_dim is -1"),
        (QWEN | {"full_attention_interval": 0}, "full_attention_interval is 0"),
        (QWEN | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 3}, "has 3 entries for 2 layers"),
        (QWEN | {"num_attention_heads": 7, "num_key_value_heads": 2}, "must be a multiple of its num_key_value"),
        (QWEN | {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, and must be from 1 to 4"),
        (QWEN | {"num_hidden_layers": 2, "mlp_only_layers": [2]}, "mlp_only_layers names layer 2"),
        (QWEN | {"num_hidden_layers": 2, "mlp_only_layers": ["x" * 999]}, "mlp_only_layers names layer x+,"),
        (DEEPSEEK | {"first_k_dense_replace": 62}, "first_k_dense_replace is 62, and must be from 0 to 61"),
        (DEEPSEEK | {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, and must be from 1 to 256"),
        (DEEPSEEK | {"vocab_size": -5}, "vocab_size is -5"),
        (DEEPSEEK | {"intermediate_size": -1}, "intermediate_size is -1"),
        (DEEPSEEK | {"index_topk": 0}, "of type indexed_attention, and its index_topk is 0"),
        ({"model_type": "gemma3_text", "sliding_window": 0}, "of type sliding_attention, and its sliding_window is 0"),
        (
            {"model_type": "llama4_text", "attention_chunk_size": None},
            "of type chunked_attention, and its attention_chunk_size is None",
        ),
        (
            QWEN | {"num_hidden_layers": 1, "layer_types": ["strange"]},
            "its layer_types names 'strange', which transformers does not know",
        ),
        (DEEPSEEK | {"index_head_dim": 0}, "its index_n_heads is 64, and it has no index_head_dim"),
        (DEEPSEEK | {"n_group": 3}, "n_routed_experts is 256, and must be a multiple of its n_group, 3"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        (
            {
                "model_type": "gemma3n_text",
                "num_hidden_layers": 3,
                "num_kv_shared_layers": 1,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            },
            "its last 1 layers share keys and values, and none before them is of type full_attention",
        ),
        ({"model_type": "mamba", "state_size": 0}, "state_size is 0"),
        ({"model_type": "falcon_mamba", "time_step_rank": -1}, "time_step_rank is -1"),
        ({"model_type": "recurrent_gemma", "lru_width": 63}, "lru_width is 63, and must be a multiple"),
        ({"model_type": "zamba", "n_mamba_heads": 0}, "n_mamba_heads is 0"),
        ({"model_type": "biogpt", "head_dim": [1] * 99}, r"head_dim is \[1, 1, 1, 1, 1, 1, 1, and must"),
        ({"model_type": "dbrx", "n_layers": None}, "does not say how many layers"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 4, "moe_top_k": 5}}, "moe_top_k is 5, and must"),
        ({"model_type": "cohere2_moe", "expert_selection_fn": "x" * 99}, "fn is x{20}, and must be one of softmax, "),
        ({"model_type": "granite_swa", "layer_rope_theta": [1e4]}, "layer_rope_theta has 1 entries for 24 layers"),
        ({"model_type": "gemma3", "text_config": {"num_attention_heads": 0}}, "num_attention_heads is 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value)[:60],
)
def test_contradictions(tmp_path: Path, described: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelLoadError, match=problem) as raised:
        load_config(tmp_path)
    message = str(raised.value)
    assert message.startswith("The model's config.json is invalid: ")
    assert "\n" not in message


@pytest.mark.parametrize("text", ["[]", '"llama"', "{", '{"model_type": "no such"}', '{"model_type": 5}', "{}"])
def test_what_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="is not one that can be served"):
        load_config(tmp_path)


def test_no_architecture_is_refused_as_it_comes() -> None:
    for model_type in (*DECODERS, *(name for row in REFUSED for name in row.model_types)):
        config = None
        with contextlib.suppress(KeyError, StrictDataclassClassValidationError):  # it has no defaults
            config = CONFIG_MAPPING[model_type]()
        check_configuration(config)


DESCRIBED = {
    name: {
        key: value
        for key, value in CONFIG_MAPPING[name.partition("/")[0]](**settings_of(name)).to_dict().items()
        if value is not None
    }
    for name in ("qwen3_5_text", "kimi_linear", "gemma3n_text", "lfm2", "deepseek_v3")
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(DESCRIBED)), st.data())
def test_a_wrong_value_is_said_and_never_a_stack_trace(name: str, data: st.DataObject) -> None:
    described = DESCRIBED[name]
    key = data.draw(st.sampled_from(sorted(described.keys() - {"model_type"})))
    wrong = data.draw(st.sampled_from([None, 0, -1, 10**12, "x", [], [None], {}, [1] * 3]))
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(RyzansteinError):
        (Path(directory) / "config.json").write_text(json.dumps(described | {key: wrong}))
        config = load_config(Path(directory))
        layout = ShardLayout.from_config(config, 2, 1)
        check_supported(config)
        layer_states(config, layout)
        longest_context(config)


@pytest.mark.parametrize("model_type", ["gemma4_unified_assistant", "swin", "wav2vec2"])
def test_what_is_not_served_is_not_called_damaged(model_type: str, tmp_path: Path) -> None:
    """Their configurations have other shapes: lists of heads, layers all of which share keys."""
    CONFIG_MAPPING[model_type]().save_pretrained(str(tmp_path))
    with pytest.raises(ModelLoadError) as raised:
        check_supported(load_config(tmp_path))
    assert "config.json is invalid" not in str(raised.value)


@pytest.mark.parametrize("model_type", ["qwen9_text", "", 5])
def test_an_unknown_type_is_named_in_one_sentence(model_type: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 8}))
    with pytest.raises(ModelLoadError, match=rf"\(transformers [0-9.]+ knows no {model_type!r}\); check the file"):
        load_config(tmp_path)

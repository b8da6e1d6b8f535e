"""The GGUF writer against the reader of the package `gguf`, and against transformers' own reading."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.errors import BenchError
from benchmarks.peers.gguf_writer import (
    check_config,
    gguf_path,
    interleaved,
    pre_tokenizer,
    vocabulary,
    write_gguf,
)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1234.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
TOKENIZER: dict[str, Any] = {
    "added_tokens": [
        {"id": 0, "content": "<|end|>", "special": True},
        {"id": 1, "content": "<plain>", "special": False},
    ],
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
    "model": {
        "type": "BPE",
        "vocab": {"<|end|>": 0, "<plain>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "Ġab": 6},
        "merges": [["a", "b"], "Ġ ab"],
    },
}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {"model.embed_tokens.weight": random(10, 64), "model.norm.weight": random(64)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "o_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = random(64, 64)
        for name in ("k_proj", "v_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = random(32, 64)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}mlp.{name}.weight"] = random(96, 64)
        tensors[f"{at}mlp.down_proj.weight"] = random(64, 96)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = random(64)
    return tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    save_file(weights(), folder / "model.safetensors")
    return folder


def read(model: Path, kind: str) -> gguf.GGUFReader:
    target = model.parent / "tiny.gguf"
    write_gguf(model, target, kind)
    assert [file.name for file in model.parent.iterdir() if file.is_file()] == ["tiny.gguf"]
    return gguf.GGUFReader(target)


def test_the_reader_finds_configuration_and_tokenizer(model: Path) -> None:
    reader = read(model, "bf16")
    found = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 1234.0,
        "llama.vocab_size": 10,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [
            "<|end|>",
            "<plain>",
            "a",
            "b",
            "ab",
            "Ġ",
            "Ġab",
            "[PAD7]",
            "[PAD8]",
            "[PAD9]",
        ],
        "tokenizer.ggml.token_type": [3, 4, 1, 1, 1, 1, 1, 5, 5, 5],
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.0), ("f16", 0.0), ("q4_0", 0.4)])
def test_the_reader_finds_the_weights(model: Path, kind: str, tolerance: float) -> None:
    tensors = {tensor.name: tensor for tensor in read(model, kind).tensors}
    source = weights()
    assert len(tensors) == len(source)

    def back(name: str) -> torch.Tensor:
        tensor = tensors[name]
        data = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        return data.view(*reversed(tensor.shape.tolist()))

    for name, original in (
        ("token_embd", source["model.embed_tokens.weight"]),
        ("blk.1.attn_v", source["model.layers.1.self_attn.v_proj.weight"]),
        ("blk.0.attn_q", interleaved(source["model.layers.0.self_attn.q_proj.weight"], 4)),
        ("blk.0.attn_k", interleaved(source["model.layers.0.self_attn.k_proj.weight"], 2)),
        ("blk.0.ffn_down", source["model.layers.0.mlp.down_proj.weight"]),
    ):
        torch.testing.assert_close(back(f"{name}.weight"), original.float(), rtol=0, atol=tolerance)
    torch.testing.assert_close(back("output_norm.weight"), source["model.norm.weight"].float())
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_rows_of_a_head_are_interleaved() -> None:
    weight = torch.arange(8.0).view(8, 1)
    assert interleaved(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_rotated_head_is_the_same_in_both_orders() -> None:
    """Rotating halves (transformers) of the original rows gives the scores of rotating pairs (GGUF) of ours."""
    torch.manual_seed(0)
    q, k = torch.randn(8, 5), torch.randn(8, 5)
    x = torch.randn(5)
    angles = torch.tensor([0.3, 0.7, 1.1, 1.9])

    def halves(vector: torch.Tensor) -> torch.Tensor:
        a, b = vector[:4], vector[4:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def pairs(vector: torch.Tensor) -> torch.Tensor:
        a, b = vector[0::2], vector[1::2]
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.stack(turned, dim=1).flatten()

    expected = halves(q @ x) @ (k @ x)
    torch.testing.assert_close(pairs(interleaved(q, 1) @ x) @ (interleaved(k, 1) @ x), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear"}},
    ],
)
def test_what_would_come_out_wrong_is_refused(change: dict[str, Any]) -> None:
    check_config(CONFIG)
    with pytest.raises(BenchError, match="leave out the peers that need GGUF"):
        check_config(CONFIG | change)


def test_an_incomplete_configuration_is_refused() -> None:
    with pytest.raises(BenchError, match=r"config\.json lacks hidden_size"):
        check_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("splitter", "name"),
    [({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}, "smollm"), (BYTES, "gpt-2")],
)
def test_splitters_have_gguf_names(splitter: dict[str, Any], name: str) -> None:
    assert pre_tokenizer({"pre_tokenizer": splitter}) == name


@pytest.mark.parametrize(
    "splitter", [None, {"type": "Metaspace"}, {"type": "Sequence", "pretokenizers": [DIGITS]}]
)
def test_unknown_splitters_are_refused(splitter: dict[str, Any] | None) -> None:
    with pytest.raises(BenchError, match="does not know"):
        pre_tokenizer({"pre_tokenizer": splitter})


def test_ids_without_a_token_are_filled_up() -> None:
    tokens, types = vocabulary({"model": {"vocab": {"a": 1}}}, 3)
    assert tokens == ["[PAD0]", "a", "[PAD2]"]
    assert types == [5, 1, 5]


def test_other_weights_get_another_file(model: Path) -> None:
    before = gguf_path(model.parent, model, "bf16")
    os.utime(model / "config.json", (4e9, 4e9))
    assert gguf_path(model.parent, model, "bf16") != before
    assert gguf_path(model.parent, model, "f16") != gguf_path(model.parent, model, "bf16")


def test_a_failed_write_leaves_no_file_of_that_name(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BenchError, match="has no chat template"):
        write_gguf(model, model.parent / "tiny.gguf", "bf16")
    assert not (model.parent / "tiny.gguf").exists()

"""What is written is read by other programs: the package `gguf`, transformers, safetensors."""

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.catalogue import longest_context
from services.executor.model.conversion.check import compare
from services.executor.model.conversion.convert import convert
from services.executor.model.conversion.gguf_header import rope_factors
from services.executor.model.conversion.gguf_tokenizer import pre_tokenizer
from services.executor.model.conversion.gguf_types import DTYPES, encoded, nbytes_of, type_of
from services.executor.model.conversion.inspection import inspect
from services.executor.model.conversion.safetensors_file import packed
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.gguf_blocks import BLOCKS
from services.executor.model.loading.gguf_transforms import interleaved
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.loading.quantization_schemes import scheme_of
from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ConfigurationError, ModelLoadError, RyzansteinError
from tests.unit.executor.model.conversion.conftest import TOKENIZER, MakeModel
from tests.unit.executor.model.gguf_models import finish
from tests.unit.executor.model.gguf_parts import parts_of, write_parts
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import CPU
from tests.unit.executor.model.tiny import reference_logits

TOKENS = [[3, 17, 42, 99, 5, 6, 7, 130, 0, 12] * 3]


def ignore(stage: str, done: int, total: int) -> None:
    return


def gguf_logits(file: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor(TOKENS), use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 9}),
        ("qwen2", {"hidden_size": 64}),
        # transformers' GGUF reader knows no other width of a head.
        ("qwen3", {"attention_bias": False, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ],
)
def test_transformers_reads_the_same_model_from_gguf(
    model_of: MakeModel, tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    source = model_of(model_type, **changes)
    target = tmp_path / "out" / "model.gguf"
    assert convert(source, target, "gguf", "f32", ignore) == target.stat().st_size
    assert [path.name for path in target.parent.iterdir()] == ["model.gguf"]
    expected = reference_logits(source, TOKENS)[0]
    assert torch.allclose(gguf_logits(target), expected, atol=1e-4)


def test_metadata_are_those_of_the_model(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    convert(source, tmp_path / "model.gguf", "gguf", "q4_k_m", ignore)
    fields = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields
    found = {name: field.contents() for name, field in fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.name": "llama",
        "general.file_type": 15,
        "llama.block_count": 3,
        "llama.attention.head_count_kv": 3,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["tokenizer.ggml.tokens"][:9] == [
        "<|end|>", "<|begin|>", "<plain>", "a", "b", "ab", "Ġ", "Ġab", "[PAD8]",
    ]  # fmt: skip
    assert found["tokenizer.ggml.token_type"][:9] == [3, 3, 4, 1, 1, 1, 1, 1, 5]


@pytest.mark.parametrize("kind", sorted({one for d in DTYPES.values() for one in (d.matrices, d.vocabulary)}))
def test_bytes_are_what_the_format_says(kind: Type) -> None:
    rows = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    data = encoded(rows, kind)
    assert data.nbytes == nbytes_of((6, 512), kind)
    read = gguf.dequantize(data.view(np.uint8).reshape(6, -1), kind)
    if kind in BLOCKS and (codec := BLOCKS[kind].codec):
        room = codec.empty(6, 512)
        codec.encode_into(room, rows)
        assert np.allclose(read, room.dequantized().numpy(), atol=1e-6)
    error = float(np.square(read - rows.numpy()).mean() / rows.square().mean())
    assert error < {"Q2": 0.12, "Q3": 0.04, "Q4": 0.02, "Q5": 0.005, "Q6": 0.002, "Q8": 1e-4}.get(kind.name[:2], 1e-5)


def test_a_mixture_gives_more_bits_where_they_count() -> None:
    def kinds(name: str, width: int, dtype: str = "q4_k_m") -> Counter[Type]:
        names = [f"blk.{layer}.{name}.weight" for layer in range(32)]
        return Counter(type_of(one, (256, width), DTYPES[dtype], 32) for one in names)

    assert kinds("attn_q", 512) == {Type.Q4_K: 32}
    assert kinds("ffn_down", 512) == kinds("attn_v", 256) == {Type.Q6_K: 16, Type.Q4_K: 16}
    assert set(kinds("ffn_down", 512, "q2_k")) == {Type.Q3_K}
    assert kinds("attn_q", 96, "q5_k_s") == {Type.Q5_1: 32}
    # Rows that are no multiple of 256 get what llama.cpp gives them; a multiple of nothing stays plain.
    assert kinds("attn_v", 96) == {Type.Q8_0: 16, Type.Q5_0: 16}
    assert kinds("attn_q", 72) == {Type.F16: 32}
    assert type_of("output.weight", (99, 512), DTYPES["q4_k_m"], 32) is Type.Q6_K
    assert type_of("output_norm.weight", (512,), DTYPES["q4_0"], 32) is Type.F32


def test_plain_safetensors_are_transformers_model(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama")
    convert(source, tmp_path / "out", "safetensors", "f16", ignore)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.half().tolist() for name, tensor in before.items()} == {
        name: tensor.tolist() for name, tensor in after.items()
    }
    assert AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).dtype is torch.float16
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == TOKENIZER


def unpacked(words: torch.Tensor, bits: int) -> np.ndarray[Any, Any]:
    """int32 [rows, n] to [rows, n * 32 / bits], by the document of compressed-tensors."""
    held = words.contiguous().numpy().view(np.uint32)
    lanes = [(held >> np.uint32(shift)) & np.uint32((1 << bits) - 1) for shift in range(0, 32, bits)]
    return np.stack(lanes, axis=2).reshape(len(held), -1).astype(np.float32)


@pytest.mark.parametrize(("dtype", "bits", "group", "most"), [("int4-g32", 4, 32, 0.01), ("int8", 8, 0, 1e-4)])
def test_compressed_tensors_have_the_weights(
    model_of: MakeModel, tmp_path: Path, dtype: str, bits: int, group: int, most: float
) -> None:
    source = model_of("llama", hidden_size=96, num_attention_heads=6)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "weight_dtype": "bf16"}))
    convert(source, tmp_path / "out", "safetensors", dtype, ignore)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "weight_dtype" not in config, "it was of the source's codes, and would have these unpacked"
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (bits, group or None)
    assert config["quantization_config"].get("dequantize", False) == bool(group)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    weight = before[f"{name}.weight"].numpy()
    assert after[f"{name}.weight_shape"].tolist() == list(weight.shape)
    scale = after[f"{name}.weight_scale"]
    assert scale.dtype is torch.bfloat16
    codes = unpacked(after[f"{name}.weight_packed"], bits)[:, : weight.shape[1]]
    zero = np.full(tuple(scale.shape), 128.0, np.float32)
    if group:
        zero = unpacked(after[f"{name}.weight_zero_point"].T, bits).T[: len(weight)]
    wide = [part.repeat(weight.shape[1] // scale.shape[1], axis=1) for part in (zero, scale.float().numpy())]
    read = (codes - wide[0]) * wide[1]
    assert np.square(read - weight).mean() / np.square(weight).mean() < most
    # Our own reader has the same numbers, and says so in plain weights too.
    convert(tmp_path / "out", tmp_path / "plain", "safetensors", "f32", ignore)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert np.allclose(plain[f"{name}.weight"].numpy(), read, atol=1e-6)
    assert plain.keys() == before.keys()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    # Embedding and norms are as they were.
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].bfloat16())
    assert "model.embed_tokens.weight" in after


@pytest.mark.parametrize("dtype", ["int4-g32", "int8"])
def test_compressed_tensors_itself_reads_the_weights(model_of: MakeModel, tmp_path: Path, dtype: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not here")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    convert(model_of("llama", hidden_size=96, num_attention_heads=6), tmp_path / "out", "safetensors", dtype, ignore)
    config = load_config(tmp_path / "out")
    group = config.to_dict()["quantization_config"]["config_groups"]["group_0"]
    held = load_file(tmp_path / "out" / "model.safetensors")
    with WeightFiles(tmp_path / "out", scheme_of(config)) as files:
        for name, ours in files.coded.items():
            base = name.removesuffix("weight")
            state = {key.removeprefix(base): tensor for key, tensor in held.items() if key.startswith(base)}
            theirs = PackedQuantizationCompressor.decompress(state, quantization.QuantizationScheme(**group))
            values = ours.values(tuple(slice(0, extent) for extent in ours.shape))
            assert torch.equal(theirs["weight"], values.bfloat16()), name
    # transformers loads the directory as it is, and rounds the weights to bf16.
    convert(tmp_path / "out", tmp_path / "plain", "safetensors", "bf16", ignore)
    expected, found = (reference_logits(tmp_path / name, TOKENS)[0] for name in ("plain", "out"))
    assert torch.allclose(expected, found, atol=0.02 * float(expected.abs().max()))


def test_packing_fills_the_last_word() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15, 9]], dtype=torch.uint8)
    assert packed(codes, 4).numpy().view(np.uint32).tolist() == [[0xF7654321, 9]]


@pytest.mark.parametrize(
    ("model_type", "changes", "to", "dtype", "sentence"),
    [
        ("llama", {}, "gguf", "q9_z", r"not written as q9_z, but as f32, f16"),
        ("llama", {}, "safetensors", "int4-g128", r"inputs, not a whole number of groups of 128; use int8\."),
        ("ministral", {}, "gguf", "bf16", r"type 'ministral' are not written as GGUF, but gemma, gemma2"),
        ("gemma3_text", {}, "gguf", "bf16", r"no place for sliding windows as this model has them"),
        ("gemma2", {}, "gguf", "bf16", r"a query_pre_attn_scalar other than 16, and config.json has 256"),
        (
            "gemma2",
            {"query_pre_attn_scalar": 16, "final_logit_softcapping": None},
            "gguf",
            "bf16",
            r"no place for soft caps as config.json has them",
        ),
        ("llama", {"hidden_act": "relu"}, "gguf", "bf16", r"no place for the activation relu"),
        ("llama", {"attention_bias": True}, "gguf", "bf16", r"no place for this model's biases"),
        ("smollm3", {}, "gguf", "bf16", r"elsewhere than in all layers but each fourth"),
        ("mistral", {"sliding_window": 10}, "gguf", "bf16", r"\(sliding_window 10 .* convert to safetensors"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "gguf",
            "bf16",
            r"Rotary embeddings of type 'dynamic'",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    model_of: MakeModel, tmp_path: Path, model_type: str, changes: Any, to: str, dtype: str, sentence: str
) -> None:
    source = model_of(model_type, **changes)
    target = tmp_path / ("out.gguf" if to == "gguf" else "out")
    with pytest.raises(RyzansteinError, match=sentence):
        convert(source, target, to, dtype, ignore)
    assert {path.name for path in tmp_path.iterdir()} == {model_type}


def test_a_second_conversion_is_refused(model_of: MakeModel, tmp_path: Path) -> None:
    source, refused = model_of("llama"), []

    def start_another(stage: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(ConfigurationError, match="Another process is making") as error:
                convert(source, tmp_path / "model.gguf", "gguf", "q8_0", ignore)
            refused.append(error.value)

    convert(source, tmp_path / "model.gguf", "gguf", "bf16", start_another)
    assert refused
    assert not list(tmp_path.glob(".*"))


def test_targets_and_sources_that_will_not_do(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama")
    with pytest.raises(ConfigurationError, match="exists already"):
        convert(source, tmp_path, "safetensors", "bf16", ignore)
    with pytest.raises(ConfigurationError, match=r"does not end in \.gguf"):
        convert(source, tmp_path / "out", "gguf", "bf16", ignore)
    with pytest.raises(ModelLoadError, match="is neither a model directory"):
        convert(tmp_path / "none", tmp_path / "out", "safetensors", "bf16", ignore)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="aqlm"):
        convert(source, tmp_path / "out", "safetensors", "bf16", ignore)


DIGITS, BYTES = TOKENIZER["pre_tokenizer"]["pretokenizers"]


@pytest.mark.parametrize(
    ("splitter", "name"), [({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}, "smollm"), (BYTES, "gpt-2")]
)
def test_splitters_have_names(splitter: dict[str, Any], name: str) -> None:
    assert pre_tokenizer({"pre_tokenizer": splitter}) == name


@pytest.mark.parametrize("splitter", [None, {"type": "Metaspace"}, {"type": "Sequence", "pretokenizers": [DIGITS]}])
def test_unknown_splitters_are_refused(splitter: dict[str, Any] | None) -> None:
    with pytest.raises(ModelLoadError, match="splits text by"):
        pre_tokenizer({"pre_tokenizer": splitter})


def test_rows_of_a_head_are_interleaved() -> None:
    weight = torch.arange(8.0).view(8, 1)
    assert interleaved(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama_3_scales_slow_rotations() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (factors,) = rope_factors({"rope_parameters": rope, "head_dim": 128}).values()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    assert torch.allclose(plain / factors, scaled.double(), rtol=1e-5)


def test_inspecting_names_each_tensor(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama")
    convert(source, tmp_path / "model.gguf", "gguf", "q8_0", ignore)
    plain, coded = inspect(source), inspect(tmp_path / "model.gguf")
    assert (plain.architecture, plain.bits_per_weight) == ("llama", 32.0)
    assert (coded.architecture, len(coded.tensors)) == ("llama", len(plain.tensors))
    down = next(one for one in coded.tensors if one.name == "blk.1.ffn_down.weight")
    assert (down.format, down.shape, down.bytes) == ("Q8_0", (72, 96), 72 * 3 * 34)
    assert plain.parameters == coded.parameters
    with pytest.raises(ModelLoadError, match="does not exist"):
        inspect(tmp_path / "none")


def test_inspecting_shows_quantized_weights_whole(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama", hidden_size=96, num_attention_heads=6)
    convert(source, tmp_path / "out", "safetensors", "int4-g32", ignore)
    plain, coded = inspect(source), inspect(tmp_path / "out")
    assert [one.name for one in coded.tensors] == [one.name for one in plain.tensors]
    assert coded.parameters == plain.parameters
    one = next(one for one in coded.tensors if one.name == "model.layers.0.mlp.down_proj.weight")
    assert (one.format, one.shape) == ("compressed-tensors int4, groups of 32", (96, 96))
    assert one.bytes == 96 * 96 // 2 + 96 * 3 * 2 + 12 * 3 * 4 + 16
    assert "unpacked" not in one.computed_by


def test_pytorch_files_are_a_source(model_of: MakeModel, tmp_path: Path) -> None:
    source = model_of("llama")
    before = load_file(source / "model.safetensors")
    torch.save(before, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    convert(source, tmp_path / "model.gguf", "gguf", "f32", ignore)
    convert(source, tmp_path / "out", "safetensors", "f32", ignore)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert compare(source, tmp_path / "model.gguf", ignore).largest == 0


@pytest.mark.parametrize(
    ("to", "dtype", "least"),
    in_lanes([("gguf", "f32", 1.0), ("gguf", "q4_0", 0.3), ("safetensors", "bf16", 0.8)], [("gguf", "q4_0", 0.3)]),
)
def test_checking_tells_how_far_two_are_apart(
    model_of: MakeModel, tmp_path: Path, to: str, dtype: str, least: float
) -> None:
    source, target = model_of("llama"), tmp_path / "out.gguf" if to == "gguf" else tmp_path / "out"
    convert(source, target, to, dtype, ignore)
    found = compare(source, target, ignore)
    assert found.tokens == 512
    assert found.same_top >= least
    assert (found.largest == 0) == (dtype == "f32")
    before, after = found.perplexity
    assert after == pytest.approx(before, rel=1e-6 if dtype == "f32" else 0.5)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
GEMMA3_LAYERS = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": False}),
        ("granite", {"attention_bias": False, "mlp_bias": False, "residual_multiplier": 0.3}),
        ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
        ("seed_oss", {}),
        ("phi3", {"sliding_window": 9}),
        ("phi3", {"hidden_size": 144, "original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "beta_fast": 32.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("gemma", {}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3_text", {"query_pre_attn_scalar": 16, **GEMMA3_LAYERS}),
        ("gemma3_text", {"query_pre_attn_scalar": 16, **GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPE}),
    ],
)
def test_there_and_back_is_the_same_model(
    model_of: MakeModel, tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    source = model_of(model_type, **changes)
    convert(source, tmp_path / "model.gguf", "gguf", "f32", ignore)
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "f32", ignore)
    before, after = (load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    assert before.keys() == after.keys()
    offset = model_type.startswith("gemma")  # one is added to its norms, and taken away again
    same = functools.partial(torch.allclose, rtol=0, atol=1e-6) if offset else torch.equal
    assert all(same(before[name], after[name]) for name in before)
    said = [json.loads((one / "config.json").read_bytes())["architectures"] for one in (source, tmp_path / "back")]
    assert said[0] == said[1], "other programs know a model by it"
    expected, found = (reference_logits(one, TOKENS)[0] for one in (source, tmp_path / "back"))
    assert torch.allclose(expected, found, atol=1e-5 if offset else 0)
    assert not list(tmp_path.glob(".*"))


def test_codes_of_a_file_become_numbers(model_of: MakeModel, tmp_path: Path) -> None:
    convert(model_of("llama"), tmp_path / "model.gguf", "gguf", "q8_0", ignore)
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "f32", ignore)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tmp_path / "model.gguf")).tensors}
    stored = tensors["blk.2.ffn_down.weight"]
    back = load_file(tmp_path / "back" / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    assert np.array_equal(gguf.dequantize(stored.data, stored.tensor_type), back.numpy())


def test_a_tensor_of_another_shape_is_not_converted(model_of: MakeModel, tmp_path: Path) -> None:
    convert(model_of("llama"), tmp_path / "model.gguf", "gguf", "f32", ignore)
    keys, tensors = parts_of(tmp_path / "model.gguf")
    turned = [one._replace(shape=one.shape[::-1]) if one.name == "blk.0.attn_k.weight" else one for one in tensors]
    write_parts(tmp_path / "model.gguf", keys, turned)
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be used: the tensor blk\.0\.attn_k\.weight has"):
        convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "f32", ignore)


def llama_3(original: int) -> dict[str, Any]:
    scale = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": original, **scale}


def test_rotary_factors_are_not_lost_silently(model_of: MakeModel, tmp_path: Path) -> None:
    convert(model_of("llama", rope_parameters=llama_3(64)), tmp_path / "model.gguf", "gguf", "bf16", ignore)
    with pytest.raises(ModelLoadError, match="by factors that are not Llama 3's"):
        convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "bf16", ignore)
    # A file has a place for them, and a check computes with them.
    convert(tmp_path / "model.gguf", tmp_path / "again.gguf", "gguf", "f32", ignore)
    assert compare(tmp_path / "model.gguf", tmp_path / "again.gguf", ignore).largest == 0


def test_rotary_factors_of_llama_3_are_known(model_of: MakeModel, tmp_path: Path) -> None:
    rope = llama_3(8192)
    convert(model_of("llama", rope_parameters=rope), tmp_path / "model.gguf", "gguf", "f32", ignore)
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "f32", ignore)
    written = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]
    assert {name: written[name] for name in rope} == rope
    assert compare(tmp_path / "model.gguf", tmp_path / "back", ignore).largest < 1e-4


def test_a_file_of_another_type_says_the_same(model_of: MakeModel, tmp_path: Path) -> None:
    source, plain, coded = (tmp_path / name for name in ("q8.gguf", "plain.gguf", "q4.gguf"))
    convert(model_of("llama", hidden_size=96, num_attention_heads=6), source, "gguf", "q8_0", ignore)
    convert(source, plain, "gguf", "f32", ignore)
    convert(source, coded, "gguf", "q4_0", ignore)
    fields = [
        {name: field.contents() for name, field in gguf.GGUFReader(str(file)).fields.items()}
        for file in (source, plain, coded)
    ]
    stored = ("general.file_type", "GGUF.tensor_count", "GGUF.kv_count")
    said = [{name: value for name, value in one.items() if name not in stored} for one in fields]
    assert said[0] == said[1] == said[2]
    assert [one["general.file_type"] for one in fields] == [7, 0, 2]
    before, after = ({tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors} for file in (source, coded))
    assert before.keys() == after.keys()
    assert after["blk.1.ffn_up.weight"].tensor_type is Type.Q4_0
    # What has its type already stays as it is, and so do vectors.
    for name in ("token_embd.weight", "output_norm.weight"):
        assert np.array_equal(before[name].data, after[name].data)


def test_a_file_in_parts_is_joined(model_of: MakeModel, tmp_path: Path) -> None:
    convert(model_of("llama"), tmp_path / "model.gguf", "gguf", "f32", ignore)
    parts = split(tmp_path / "model.gguf")
    convert(parts[1], tmp_path / "joined.gguf", "gguf", "f32", ignore)
    whole, joined = (gguf.GGUFReader(str(tmp_path / name)) for name in ("model.gguf", "joined.gguf"))
    assert not [name for name in joined.fields if name.startswith("split.")]
    assert {t.name: t.data.tobytes() for t in whole.tensors} == {t.name: t.data.tobytes() for t in joined.tensors}


def split(file: Path) -> list[Path]:
    """The file as two, as llama-gguf-split makes them."""
    reader = gguf.GGUFReader(str(file))
    paths = [file.with_name(f"{file.stem}-0000{number}-of-00002.gguf") for number in (1, 2)]
    middle = len(reader.tensors) // 2
    for number, tensors in enumerate((reader.tensors[:middle], reader.tensors[middle:])):
        writer = gguf.GGUFWriter(str(paths[number]), "llama")
        for field in reader.fields.values():
            if number == 0 and not field.name.startswith(("GGUF.", "general.architecture")):
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


@pytest.mark.parametrize("context", [64, 65])
def test_long_rope_of_a_file_is_that_of_its_model_at_any_length(
    model_of: MakeModel, tmp_path: Path, context: int
) -> None:
    changes = {"hidden_size": 144, "original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE}
    source = model_of("phi3", **changes)
    convert(source, tmp_path / "model.gguf", "gguf", "f32", ignore)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "linked", lambda *_: None)
    assert longest_context(load_config(tmp_path / "linked")) == longest_context(load_config(source)) > 64
    layout = ShardLayout.from_config(load_config(source), 1, 0)
    ours, theirs = (
        load_model(where, torch.float32, layout, SingleRank(), CPU, lambda *_: None, context=context).get_submodule(
            "model.rotary_emb"
        )
        for where in (tmp_path / "linked", source)
    )
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == theirs.attention_scaling > 1
    factors = LONG_ROPE["long_factor" if context > 64 else "short_factor"]
    plain = 1e4 ** (-torch.arange(0, 8, 2).float() / 8)
    assert torch.allclose(ours.inv_freq, plain / torch.tensor(factors))

"""GGUF files through the loader: what each rank holds, against transformers' own reading of the same file."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig

from services.executor.collectives.base import Collectives
from services.executor.families.gguf_architectures import GGUF
from services.executor.model.conversion.inspection import inspect
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.loader import load_config, unpack
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.quantized import DeferredRows, QuantizedRows
from shared.errors import ModelLoadError
from tests.unit.executor.cpu.test_decoder import errors, holds_codes, runner_of, truth
from tests.unit.executor.model.conversion.test_convert import split
from tests.unit.executor.model.gguf_models import ARCHITECTURES, OWN, finish, write_gguf
from tests.unit.executor.model.lanes import in_lanes, in_rings, natively
from tests.unit.executor.model.loading import gguf_checks
from tests.unit.executor.model.loading.gguf_checks import (
    assert_model,
    assert_near_what_is_unpacked,
    close,
    converted,
    load,
    values_of,
)
from tests.unit.executor.model.loading.test_gguf_blocks import QUANTIZED
from tests.unit.executor.model.ring import in_shared_memory, mixed_script
from tests.unit.executor.model.tiny import make_model

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# 1024 inputs are no three equal parts of whole blocks, three heads no two.
THREE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "hidden_size": 768,
    "intermediate_size": 1024,
}
# What its files say, and transformers' reader of them takes for granted.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False, "head_dim": 128},
    "qwen2_moe": {
        "mlp_only_layers": [],
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {"attention_bias": False, "head_dim": 128, "moe_intermediate_size": 768, "hidden_size": 256},
    "phi3": {"vocab_size": 32064, "partial_rotary_factor": 1.0},
}


def make(tmp_path: Path, model_type: str, kind: str, changes: Mapping[str, Any] | None = None, **extra: str) -> Path:
    source = make_model(tmp_path / "plain", model_type, **{**SIZES, **CHANGES.get(model_type, {}), **(changes or {})})
    return write_gguf(source, tmp_path / "model.gguf", kind, **extra)


def theirs(file: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return dict(model.state_dict())


# For `make test`; what codes of each kind stand for is held by test_gguf_blocks.py.
SOME = ("Q8_0", "Q4_K", "IQ4_XS")


@pytest.mark.parametrize(
    "kind", in_lanes(QUANTIZED, [kind for kind in QUANTIZED if kind.name in SOME]), ids=lambda kind: kind.name
)
def test_weights_are_held_as_the_file_has_them(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    file = make(tmp_path, "llama", kind.name)
    model = load(converted(file), torch.float32, keep_codes=True)
    held = [module for module in model.modules() if isinstance(module, WeightShard)]
    assert all(isinstance(module.stored, QuantizedRows) for module in held)
    expected = theirs(file)
    close(values_of(model), expected, within=0)
    later = load(converted(file), torch.float32, keep_codes=True, defer_codes=True)
    held = [module for module in later.modules() if isinstance(module, WeightShard)]
    assert all(isinstance(module.stored, DeferredRows) for module in held)
    close(values_of(later), expected, within=0)
    unpack(later, torch.float32)
    close(values_of(later), expected, within=0)
    unpack(model, torch.float32)
    close(values_of(model), expected, within=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight


OWN_CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2_moe": {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "head_dim": 32},
    "granite": {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.25,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gemma": {"hidden_size": 128, "intermediate_size": 192},  # wider ones round by more than is allowed
    "gemma2": {"query_pre_attn_scalar": 64},
    # One that sees all behind five with windows
    "gemma3_text": {
        "query_pre_attn_scalar": 64,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "rope_theta": 5e4},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(("model_type", "ranks"), in_rings(sorted({*OWN, *ARCHITECTURES}), (), ()))
def test_architectures_of_our_own_table_are_the_models(tmp_path: Path, model_type: str, ranks: int) -> None:
    """Held against what the file was made of."""
    file = make(tmp_path, model_type, "F32", OWN_CHANGES.get(model_type))
    assert_model(converted(file), ranks, gguf_checks.theirs(tmp_path / "plain"))


def test_without_its_row_a_file_is_refused_and_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {kind: make(tmp_path / kind, kind, "F32") for kind in ("arcee", "olmo2")}
    monkeypatch.delitem(GGUF, "arcee")
    with pytest.raises(ModelLoadError, match=r"architecture 'arcee' is not served from GGUF files: "):
        converted(files["arcee"])
    assert load_config(converted(files["olmo2"])).model_type == "olmo2"


@pytest.mark.parametrize("value", [1 << 31, 4097])
def test_more_layers_than_a_model_has_are_not_built(tmp_path: Path, value: int) -> None:
    file = make(tmp_path, "llama", "F32")
    lie(file, "llama.block_count", value)
    with pytest.raises(ModelLoadError, match=rf"its llama.block_count is {value}, and no model with more than 4096"):
        converted(file)


SIZES_OF = [f"llama.{name}" for name in ("embedding_length", "feed_forward_length", "attention.head_count")]
SIZES_OF += ["llama.attention.head_count_kv", "llama.attention.key_length"]


@pytest.mark.parametrize(
    ("key", "value"), [*((key, (1 << 31) + 1) for key in SIZES_OF), *((key, 7) for key in SIZES_OF), (SIZES_OF[2], 0)]
)
def test_sizes_that_are_not_the_tensors_are_refused(tmp_path: Path, key: str, value: int) -> None:
    file = make(tmp_path, "llama", "Q8_0", {"num_hidden_layers": 1})
    lie(file, key, value)
    with pytest.raises(ModelLoadError) as raised:
        load(converted(file), torch.float32, keep_codes=True)
    assert "\n" not in str(raised.value)


def lie(file: Path, key: str, value: int) -> None:
    """Has the metadata say `value` where they have another number of 32 bits."""
    whole, said = file.read_bytes(), key.encode() + struct.pack("<I", gguf.GGUFValueType.UINT32)
    at = whole.index(said) + len(said)
    file.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])


def test_files_in_parts_are_served_as_one(tmp_path: Path) -> None:
    file = make(tmp_path, "llama", "Q4_K", {"num_hidden_layers": 2})
    expected = values_of(load(converted(file), torch.float32, keep_codes=True))
    target = tmp_path / "parts"
    convert_gguf(split(file)[0], target, lambda *stage: None)
    file.unlink()
    close(values_of(load(target, torch.float32, keep_codes=True)), expected, within=0)


def test_what_a_file_has_to_say_is_named(tmp_path: Path) -> None:
    file = make(tmp_path, "granite", "F32")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"granite.logit_scale", b"granite.logit_scald"))
    with pytest.raises(ModelLoadError, match=r"does not say granite\.logit_scale"):
        converted(file)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    in_lanes(
        [*((name, "Q8_0") for name in ARCHITECTURES), *(("llama", "F32"), ("llama", "F16"), ("gemma3_text", "BF16"))],
        [("llama", "F16"), ("gemma3_text", "BF16"), ("phi3", "Q8_0"), ("qwen3_moe", "Q8_0")],
    ),
)
def test_every_architecture_has_its_weights_in_its_places(tmp_path: Path, model_type: str, kind: str) -> None:
    file = make(tmp_path, model_type, kind)
    expected = theirs(file)
    for keep_codes in (False, True):
        close(values_of(load(converted(file), torch.float32, keep_codes=keep_codes)), expected, within=0)


def test_what_is_unpacked_is_named_in_the_log(tmp_path: Path) -> None:
    file = make(tmp_path, "llama", "F16", attn_v="TQ2_0")
    with capture_logs() as lines:
        model = load(converted(file), torch.float32)
    [line] = [line for line in lines if line["event"] == "weights_unpacked"]
    assert (line["type"], line["tensors"], line["names"][0]) == ("TQ2_0", 3, "blk.0.attn_v.weight")
    close(values_of(model), theirs(file), within=0)


def test_rotary_factors_divide_the_frequencies(tmp_path: Path) -> None:
    file = make(tmp_path, "llama", "Q8_0")
    plain = load(converted(file), torch.float32).model.rotary_emb.inv_freq
    factors = np.linspace(1, 8, 32).astype(np.float32)
    again = with_tensor(file, tmp_path / "again" / "model.gguf", "rope_freqs.weight", factors)
    scaled = load(converted(again), torch.float32).model.rotary_emb.inv_freq
    assert torch.equal(scaled, plain / torch.from_numpy(factors))
    wrong = with_tensor(file, tmp_path / "wrong" / "model.gguf", "rope_freqs.weight", factors[:7])
    with pytest.raises(ModelLoadError, match="7 rotary factors for 32 frequencies"):
        load(converted(wrong), torch.float32)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotary_positions_are_read(tmp_path: Path, kind: str) -> None:
    source = make_model(tmp_path / "plain", "llama", **SIZES)
    scaling = {"type": kind, "factor": 4.0, "original_context_length": 32}
    file = write_gguf(source, tmp_path / "model.gguf", "Q8_0", scaling)
    found = load_config(converted(file)).rope_parameters
    assert (found["rope_type"], found["factor"]) == (kind, 4.0)
    assert found.get("original_max_position_embeddings") == (32 if kind == "yarn" else None)


def test_what_does_not_fit_is_refused_with_the_tensor(tmp_path: Path) -> None:
    file = make(tmp_path, "llama", "Q8_0")
    strange = with_tensor(file, tmp_path / "strange" / "model.gguf", "blk.0.other.weight", np.ones(4, np.float32))
    with pytest.raises(ModelLoadError, match=r"hold a tensor blk.0.other.weight"):
        load(converted(strange), torch.float32)
    content = bytearray(file.read_bytes())
    tensor = next(found for found in gguf.GGUFReader(str(file)).tensors if found.name == "blk.1.ffn_up.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = b"\xff\x7f"
    directory = converted(file)
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"blk.1.ffn_up.weight .* NaN or infinite values"):
        load(directory, torch.float32, keep_codes=True)


def with_tensor(file: Path, path: Path, name: str, values: Any) -> Path:
    """The model of `file` with one more tensor."""
    path.parent.mkdir()
    reader = gguf.GGUFReader(str(file))
    writer = gguf.GGUFWriter(str(path), "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, values)
    finish(writer)
    return path


# Of a code in memory
BITS = {**dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"), 3), "TQ1_0": 2, "TQ2_0": 2}


@natively
@pytest.mark.parametrize(
    ("model_type", "kind"),
    in_lanes(
        [
            *(("llama", kind.name) for kind in QUANTIZED),
            *(("qwen2", "Q5_1"), ("gemma3_text", "Q8_0"), ("qwen3_moe", "Q4_K")),
            *(("mixtral", "Q4_K"), ("qwen2_moe", "Q8_0")),
        ],
        [("llama", "Q8_0"), ("llama", "IQ4_XS"), ("llama", "IQ2_XS"), ("qwen3_moe", "Q4_K")],
    ),
)
def test_the_kernels_compute_with_the_codes(tmp_path: Path, model_type: str, kind: str) -> None:
    file = make(tmp_path, model_type, kind, {"num_hidden_layers": 1}, attn_v="Q6_K")
    runner = runner_of(converted(file), native=True)
    layer = runner.packed.layers[0]
    down = layer.experts.down if layer.experts else layer.down
    assert down.form.bits == BITS.get(kind, int(kind[1]) if kind.startswith("Q") else 4)
    served = {tensor.name: tensor.computed_by for tensor in inspect(file).tensors}
    assert served[f"blk.0.ffn_down{'_exps' if layer.experts else ''}.weight"].startswith("kernel for codes")
    assert_near_what_is_unpacked(file, runner)


@natively
@pytest.mark.parametrize(
    ("ranks", "kind", "model_type"),
    in_lanes(
        [
            *((2, "Q8_0", "llama"), (2, "IQ4_XS", "llama"), (3, "Q4_K", "llama"), (3, "Q6_K", "llama")),
            (2, "Q5_K", "qwen3_moe"),
        ],
        [],
        [(3, "Q4_K", "llama"), (2, "Q5_K", "qwen3_moe")],
    ),
)
def test_ranks_cut_the_codes(tmp_path: Path, ranks: int, kind: str, model_type: str) -> None:
    file = make(tmp_path, model_type, kind, THREE)
    directory = converted(file)
    expected = truth(converted(file, unpacked=True), mixed_script()[0].sequences)

    def work(ring: Collectives) -> Tensor:
        runner = runner_of(directory, native=True, collectives=ring)
        layer = runner.packed.layers[0]
        down = layer.experts.down if layer.experts else layer.down
        assert holds_codes(down)
        return errors(runner, expected)

    ours = in_shared_memory(ranks, work)[0]
    alone = errors(runner_of(directory, native=True), expected)
    assert ours.mean() < 1.3 * alone.mean()

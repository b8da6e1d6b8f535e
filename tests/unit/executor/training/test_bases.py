"""Bases that serving has packed are trained as what their codes stand for, in the pages of the file that it keeps."""

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.packed_model import PackedModel
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS
from services.executor.platforms.cpu import Cpu
from services.executor.training.base import packed
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.loading.gguf_checks import converted
from tests.unit.executor.model.loading.quantized_weights import FORMS
from tests.unit.executor.model.loading.test_gguf_weights import make
from tests.unit.executor.model.loading.test_quantized_checkpoints import make_checkpoint
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.models import CPU, assert_as_peft, backward, batch_of, reference, trainable, worst

CACHED = {"weight_cache_bytes": 1 << 30}


def in_bf16(directory: Path, model_type: str, **changes: Any) -> Path:
    """A tiny model of heads that the native kernels compute, stored in bf16."""
    file = make_model(directory, model_type, **{"head_dim": 32, **changes}) / "model.safetensors"
    save_file({name: held.bfloat16() for name, held in load_file(file).items()}, file, {"format": "pt"})
    return said_to_be_bf16(directory)


def said_to_be_bf16(directory: Path) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


def served(directory: Path, codec: str = "", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What serving makes of each module's weight, with that `weight_dtype` or as the files have it, unpacked by
    PyTorch."""
    layout = ShardLayout.from_config(load_config(directory), 1, 0)
    how = CODECS[codec] if codec else None
    model = load_model(
        *(directory, dtype, layout, SingleRank(), CPU, lambda done, total: None, how), keep_codes=not codec
    )
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, WeightShard):
            held = module.stored
            if isinstance(held, QuantizedRows):
                weights[name] = held.dequantized()
            else:
                assert isinstance(held, Tensor)
                weights[name] = held.detach().float()
    return weights


@natively
@pytest.mark.parametrize(
    ("model_type", "codec"),
    in_lanes(
        [("llama", "q4_k"), ("qwen2", "int8"), ("gemma2", "q8_0"), ("phi3", "int4"), ("qwen3", "fp8")],
        [("llama", "q4_k")],
    ),
)
def test_weights_that_serving_quantizes(tmp_path: Path, model_type: str, codec: str) -> None:
    directory = in_bf16(tmp_path / "model", model_type, tie_word_embeddings=model_type != "qwen2")
    model = trainable(directory, weight_dtype=codec, **CACHED)
    assert model.description["base"] == "packed weights"
    assert_as_peft(model, reference(directory, served(directory, codec)))


# Of which serving keeps gate and up, which meet in registers, as bf16: codes of floats and of other orders cannot be
# one.
TURNED = ("nf4", "gptq act-order")


@natively
@pytest.mark.parametrize(
    "form", in_lanes(["nf4", "gptq act-order", "awq", "int8 per channel", "fp8 by blocks"], ["nf4", "awq"])
)
def test_checkpoints_that_are_quantized(tmp_path: Path, form: str) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", FORMS[form])
    directory = said_to_be_bf16(checkpoint.quantized)
    model = trainable(directory, **CACHED)
    assert model.description["base"] == "packed weights"
    weights = served(directory)
    if form in TURNED:
        for name in weights:
            if name.endswith(("gate_proj", "up_proj")):
                weights[name] = weights[name].bfloat16().float()
    assert_as_peft(model, reference(checkpoint.plain, weights))


@natively
@pytest.mark.parametrize("unpacked", in_lanes([False, True], [True]))
def test_a_gguf_file(tmp_path: Path, unpacked: bool) -> None:
    directory = said_to_be_bf16(converted(make(tmp_path, "llama", "Q4_K")))
    if unpacked:  # as the model says itself
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "weight_dtype": "bf16"}))
    model = trainable(directory, **CACHED)
    assert model.description["base"] == "packed weights"
    weights = served(directory)
    if unpacked:
        weights = {name: held.bfloat16().float() for name, held in weights.items()}
    assert_as_peft(model, reference(tmp_path / "plain", weights))


def test_models_of_other_families_keep_their_codes(tmp_path: Path) -> None:
    """What the native kernels do not compute, and what has no kernels."""
    directory = make_model(tmp_path / "model", "olmo2", hidden_size=96)
    model = trainable(directory, weight_dtype="int8")
    assert model.description["base"] == "codes in memory"
    assert_as_peft(model, reference(directory, served(directory, "int8", torch.float32)))


@natively
def test_without_kernels_or_room_on_disk_it_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, batch = in_bf16(tmp_path / "model", "llama"), batch_of()
    model = trainable(directory, weight_dtype="q4_k", **CACHED)
    expected, gradients = backward(model, batch)
    with capture_logs() as log:
        in_memory = trainable(directory, weight_dtype="q4_k", weight_cache_bytes=0, model_cache=tmp_path / "other")
    assert "packed_weights_in_memory" in [line["event"] for line in log]
    assert torch.equal(backward(in_memory, batch)[0], expected)
    monkeypatch.setattr(packed, "load_library", lambda: None)
    unpacked = trainable(directory, weight_dtype="q4_k", **CACHED)
    assert unpacked.description["base"] == "codes in memory"
    found, others = backward(unpacked, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert worst(others, gradients) < 1e-4


@pytest.mark.parametrize(
    ("asked", "stored", "fast", "expected"),
    [
        ("bf16", "float32", True, "bfloat16"),
        ("bf16", "float32", False, "float32"),
        ("fp32", "bfloat16", True, "float32"),
        ("auto", "float32", True, "float32"),
    ],
)
def test_it_computes_in_the_type_that_serving_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, stored: str, fast: bool, expected: str
) -> None:
    """`fast`: whether PyTorch multiplies bf16 fast."""
    monkeypatch.setattr(Cpu, "has_fast_bf16", lambda self: fast)
    directory = make_model(tmp_path / "model", "llama")
    if stored == "bfloat16":
        said_to_be_bf16(directory)
    model = trainable(directory, dtype=None, serving_dtype=asked)
    assert model.description["dtype"] == expected
    _, gradients = backward(model, batch_of())
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values())


@natively
@pytest.mark.parametrize("codec", ["", "q4_k"])
def test_the_base_is_in_the_pages_of_a_file_alone(tmp_path: Path, codec: str) -> None:
    directory = in_bf16(tmp_path / "model", "llama")
    changes = {"weight_dtype": codec} if codec else {}
    trainable(directory, **CACHED, **changes)  # packs what is not packed yet
    with capture_logs() as log:
        model = trainable(directory, **CACHED, **changes)
    assert "packing_weights" not in [line["event"] for line in log]
    backward(model, batch_of())
    ending = ".packed" if codec else ".safetensors"
    weights = [linear.weight for linear in model.linears.values()]
    held = (
        [part.linear.packed for weight in weights for part in weight._parts]
        if codec
        else [one._weight for one in weights]
    )
    places = [tensor.data_ptr() for tensor in held]
    assert len(places) >= 21
    for address in places:
        file, anonymous = page_of(address)
        assert file.endswith(ending)
        assert anonymous == 0, "a page that is written to becomes the process's own"


@natively
def test_what_is_packed_is_let_go_before_its_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[PackedModel]] = []
    held: list[bool] = []
    pack, mapped = packed.pack, packed._mapped

    def packing(*arguments: Any) -> PackedModel:
        model = pack(*arguments)
        made.append(weakref.ref(model))
        return model

    def mapping(*arguments: Any) -> PackedModel | None:
        held.extend(model() is not None for model in made)
        return mapped(*arguments)

    monkeypatch.setattr(packed, "pack", packing)
    monkeypatch.setattr(packed, "_mapped", mapping)
    trainable(in_bf16(tmp_path / "model", "llama"), weight_dtype="q4_k", model_cache=tmp_path, **CACHED)
    assert held == [False]


def page_of(address: int) -> tuple[str, int]:
    """The file that is mapped at `address`, and how many of its kilobytes are this process's own copy."""
    file, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
            file = found[3]
        elif inside and line.startswith("Anonymous:"):
            return file, int(line.split()[1])
    return "", 0

"""Codes that are chosen by what a layer computes of a text."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.executor.model.conversion.calibration import Calibration, codes_of
from services.executor.model.conversion.check import _logits
from services.executor.model.conversion.convert import convert, open_model
from services.executor.model.conversion.models import SourceTensor, tokens_of
from services.executor.model.conversion.safetensors_file import by_layer
from services.executor.model.quantizing import CODECS
from shared.errors import ConfigurationError, ModelLoadError
from tests.unit.executor.model.conversion.conftest import MakeModel
from tests.unit.executor.model.lanes import in_lanes

SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6}


def ignore(stage: str, done: int, total: int) -> None:
    return


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Of the tests' tokenizer, which knows two letters: the fewest sequences."""
    generator = torch.Generator().manual_seed(2)
    words = ["a", "b", "ab", " ab", " "]
    chosen = torch.randint(0, len(words), (2800,), generator=generator)
    path = tmp_path / "text.txt"
    path.write_text("".join(words[int(one)] for one in chosen))
    return path


@pytest.mark.parametrize("dead", [0, 5])
def test_what_a_weight_makes_of_its_inputs_is_kept_better(dead: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 128, generator=generator)
    inputs = torch.randn(600, 32, generator=generator) @ torch.randn(32, 128, generator=generator)
    inputs[:, :dead] = 0
    codec = CODECS["int4"]
    rounded = codec.empty(40, 128)
    codec.encode_into(rounded, weight)
    rows = rounded.picked(torch.arange(40))
    rows.codes.copy_(codes_of(weight, inputs.T @ inputs, rows))
    errors = [float((inputs @ (one.dequantized() - weight).T).square().mean()) for one in (rounded, rows)]
    assert errors[1] < errors[0] / 3
    assert int(rows.codes.max()) <= 15


def test_products_that_cannot_be_inverted_are_refused() -> None:
    codec = CODECS["int4"]
    rows = codec.empty(4, 64)
    with pytest.raises(ModelLoadError, match="is not finite, so it cannot be calibrated"):
        codes_of(torch.randn(4, 64), torch.full((64, 64), float("nan")), rows)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    in_lanes([("llama", {}), ("gemma3_text", {}), ("qwen2", {"hidden_size": 128})], [("llama", {})]),
)
def test_a_calibrated_model_is_nearer_to_the_plain_one(
    model_of: MakeModel, tmp_path: Path, text: Path, model_type: str, changes: dict[str, Any]
) -> None:
    source = model_of(model_type, **{**SIZES, **changes})
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    stages: list[str] = []
    convert(source, tmp_path / "rounded", "safetensors", "int4-g32", ignore)
    convert(
        source,
        tmp_path / "calibrated",
        "safetensors",
        "int4-g32",
        lambda stage, done, total: stages.append(stage),
        calibrate=text,
    )
    assert "calibrating" in stages
    assert not list(tmp_path.glob(".*"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("rounded", "calibrated"))
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert differing == {name for name in before if name.endswith("weight_packed")}, "scales are the same"
    names = [(tmp_path / name / "config.json").read_text() for name in ("rounded", "calibrated")]
    assert json.loads(names[0]) == json.loads(names[1])
    plain, rounded, calibrated = (
        logits(path, text) for path in (source, tmp_path / "rounded", tmp_path / "calibrated")
    )
    assert float((calibrated - plain).square().mean()) < 0.3 * float((rounded - plain).square().mean())


def logits(directory: Path, text: Path) -> torch.Tensor:
    """Of the text's beginning."""
    with open_model(directory) as model:
        return _logits(model, tokens_of(model, text.read_text())[:256])


def test_layers_come_in_their_order() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2, 10, 11)]
    tensors = [SourceTensor(name, (1, 1), lambda: iter(())) for name in [*sorted(names), "model.norm.weight"]]
    assert [tensor.name for tensor in sorted(tensors, key=by_layer)] == [*names, "model.norm.weight"]


class Killed(Exception):
    pass


def test_a_calibration_goes_on_where_it_was_stopped(model_of: MakeModel, tmp_path: Path, text: Path) -> None:
    source = model_of("llama", **SIZES)
    convert(source, tmp_path / "whole", "safetensors", "int4-g32", ignore, calibrate=text)

    def stop_in_the_second_layer(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("calibrating", 2):
            raise Killed

    with pytest.raises(Killed):
        convert(source, tmp_path / "out", "safetensors", "int4-g32", stop_in_the_second_layer, calibrate=text)
    calibrated: list[int] = []

    def note(stage: str, done: int, total: int) -> None:
        if stage == "calibrating":
            calibrated.append(done)

    convert(source, tmp_path / "out", "safetensors", "int4-g32", note, calibrate=text)
    assert calibrated == [1, 2, 2, 3], "the first layer was whole"
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "whole", "out", "text.txt"}


def test_texts_that_will_not_do(model_of: MakeModel, tmp_path: Path) -> None:
    source, file = model_of("llama", **SIZES), tmp_path / "text.txt"
    contents = (b"ab" * 900, b"\xff\xfe\xfd", None)
    sentences = ("has 900 tokens of this model, too few", "is not UTF-8 text", "cannot be read")
    for content, sentence in itertools.zip_longest(contents, sentences):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=sentence):
            convert(source, tmp_path / "out", "safetensors", "int4-g32", ignore, calibrate=file)
    for to, target, dtype in (("gguf", "out.gguf", "q4_0"), ("safetensors", "out", "int8")):
        with pytest.raises(ConfigurationError, match="--calibrate is for groups of 4 bits"):
            convert(source, tmp_path / target, to, dtype, ignore, calibrate=file)


def test_models_without_layers_by_that_name_are_refused(
    model_of: MakeModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.executor.model.conversion import calibration
    from services.executor.model.conversion import convert as conversion

    source = model_of("llama", **SIZES)

    def without_layers(*arguments: Any) -> Any:
        model = conversion_model(*arguments)
        model.get_decoder().layers = None
        return model

    conversion_model = calibration.empty_model
    monkeypatch.setattr(calibration, "empty_model", without_layers)
    with conversion.open_model(source) as model, pytest.raises(ModelLoadError, match="are not calibrated"):
        Calibration(model, text, lambda tensor: CODECS["int4"].empty(1, 1), ignore)

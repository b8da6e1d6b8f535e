"""`ryzanstein models inspect` and `models convert`, with the executor's process that does the work."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands.models import models_app
from shared.errors import ConfigurationError, ModelLoadError
from tests.unit.executor.model.tiny import make_model


def run(*words: str) -> str:
    result = CliRunner().invoke(models_app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.slow
def test_a_converted_model_is_inspected(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    said = run(
        "convert", str(tmp_path / "model"), str(tmp_path / "half"), "--to", "safetensors", "--dtype", "f16"
    )
    assert "half is ready" in said.replace("\n", "")
    facts = json.loads(run("inspect", str(tmp_path / "half"), "--json"))
    assert (facts["architecture"], facts["bits_per_weight"]) == ("llama", 16.0)
    with pytest.raises(ModelLoadError, match="half exists already; remove it"):
        run("convert", str(tmp_path / "model"), str(tmp_path / "half"), "--to", "safetensors")


def test_what_is_inspected_is_listed(tmp_path: Path) -> None:
    lines = run("inspect", str(make_model(tmp_path / "model", "llama"))).splitlines()
    assert lines[0].split() == ["tensor", "format", "shape", "bytes", "bits", "computed", "by"]
    norm = next(line for line in lines if line.startswith("model.norm.weight"))
    assert norm.split() == ["model.norm.weight", "float32", "72", "288", "32.00", "-"]
    assert "llama: 29 tensors (29 float32)" in "".join(lines)


def test_what_is_no_model_or_no_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match="nor a model in the cache"):
        run("inspect", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="--to ggml is not a format"):
        run("convert", str(tmp_path), str(tmp_path / "out"), "--to", "ggml")

"""`ryzanstein models inspect` and `models convert`, with the executor's process that does the work."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands.models import local
from services.cli.commands.models.local import models_app
from services.cli.commands.models.tables import memory_of
from services.executor.families.registry import DECODERS, ENCODERS
from services.executor.model.catalogue import REFUSED
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_status import ModelStatus
from shared.model_store import hub
from shared.model_store.programs import ServableVerdict
from tests.unit.executor.model.tiny import make_model


def run(*words: str) -> str:
    result = CliRunner().invoke(models_app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.nightly
def test_a_converted_model_is_inspected(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    said = run("convert", str(tmp_path / "model"), str(tmp_path / "half"), "--to", "safetensors", "--dtype", "f16")
    assert "half is ready" in said.replace("\n", "")
    facts = json.loads(run("inspect", str(tmp_path / "half"), "--json"))
    assert (facts["architecture"], facts["bits_per_weight"]) == ("llama", 16.0)
    with pytest.raises(ModelLoadError, match="half exists already; remove it"):
        run("convert", str(tmp_path / "model"), str(tmp_path / "half"), "--to", "safetensors")


@pytest.mark.slow
def test_what_is_inspected_is_listed(tmp_path: Path) -> None:
    lines = run("inspect", str(make_model(tmp_path / "model", "llama"))).splitlines()
    assert lines[0].split() == ["tensor", "format", "shape", "bytes", "bits", "computed", "by"]
    norm = next(line for line in lines if line.startswith("model.norm.weight"))
    assert norm.split() == ["model.norm.weight", "float32", "72", "288", "32.00", "-"]
    assert "llama: 29 tensors (29 float32)" in "".join(lines)


def test_architectures_that_are_served() -> None:
    found = json.loads(run("list", "--supported", "--json"))
    rows = {row["model_type"]: row for row in found["served"]}
    assert rows.keys() == {*DECODERS, *ENCODERS}
    assert rows["mistral"]["state"] == ["full", "sliding"]
    assert [row["because"] for row in found["refused"]] == [row.because for row in REFUSED]
    assert f"{len(rows)} architectures are served" in run("list", "--supported").replace("\n", " ")


def test_models_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path))
    monkeypatch.setattr(local, "running_nats", lambda *_: None)
    (tmp_path / "org--name").mkdir()
    (tmp_path / "org--name" / "config.json").write_text("{}")
    (model,) = json.loads(run("list", "--json"))["models"]
    place = {"directory": str(tmp_path / "org--name"), "revision": "", "commit": ""}
    assert model == {"name": "org/name", "bytes": 2, "packed": 0, **place}


def test_a_name_of_the_hub_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path))
    verdicts = iter([ServableVerdict("other", "No."), ServableVerdict("llama"), ServableVerdict()])
    monkeypatch.setattr(hub, "look_at", lambda name, directory, progress: next(verdicts))
    assert run("inspect", "org/name") == "org/name (other): No.\n"
    assert run("inspect", "org/name") == "org/name (llama): nothing in its config.json speaks against it\n"
    assert json.loads(run("inspect", "hf://org/name", "--json")) == {"architecture": "", "refused": ""}
    with pytest.raises(ConfigurationError, match="nor a model in the cache"):
        run("inspect", "org/na me")


def test_what_is_no_model_or_no_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match="nor a model in the cache"):
        run("inspect", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="--to ggml is not a format"):
        run("convert", str(tmp_path), str(tmp_path / "out"), "--to", "ggml")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (ModelStatus(), "-"),
        (ModelStatus("sleeping", memory=3_000_000_000), "3,000 MB"),
        (ModelStatus("loaded", memory=8_270_000_000, kv_bytes=8_000_000_000), "270 MB, KV up to 8,000 MB"),
    ],
)
def test_weights_are_told_apart_from_what_caches_may_grow_to(status: ModelStatus, told: str) -> None:
    assert memory_of(status) == told

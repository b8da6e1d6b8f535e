"""`ryzanstein models disk`: what lies where, and what nothing needs any more."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands.models.disk import disk_use
from services.cli.commands.models.local import models_app
from shared.model_store.packed import ENDING, note_model
from shared.model_store.settings import Store
from shared.models import link_gguf

MB = 1_000_000


def filled(tmp_path: Path) -> tuple[Store, Path]:
    """A cache with a model of its own and one of a GGUF file elsewhere, and a stack's data."""
    store, data = Store(tmp_path / "cache"), tmp_path / "data"
    for name in ("org--own", "gguf"):
        (store.cache / name).mkdir(parents=True)
        (store.cache / name / "config.json").write_text("{}")
    (store.cache / "org--own" / "model.safetensors").write_bytes(bytes(3 * MB))
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "m.gguf"
    file.write_bytes(bytes(2 * MB))
    link_gguf(store.cache / "gguf", file)
    store.packed.mkdir()
    for name, model in (("a", store.cache / "gguf"), ("b", store.cache / "gone")):
        path = store.packed / f"{name}{ENDING}"
        path.write_bytes(bytes(MB))
        note_model(path, model)
    (store.cache / ".org--half.partial").mkdir()
    (store.cache / ".org--half.partial" / "part").write_bytes(bytes(MB // 2))
    for place in ("logs", "nats"):
        (data / place).mkdir(parents=True)
        (data / place / "file").write_bytes(bytes(MB // 4))
    return store, data


def test_each_place_is_counted(tmp_path: Path) -> None:
    store, data = filled(tmp_path)
    found = {one.what: one for one in disk_use(store, data)}
    assert (found["models"].entries, found["models"].unneeded) == (2, 0)
    assert 3 * MB < found["models"].bytes < 3.1 * MB
    elsewhere = found["GGUF files elsewhere"]
    assert (elsewhere.entries, elsewhere.bytes, elsewhere.where) == (1, 2 * MB, str(tmp_path / "files"))
    packed = found["packed weights"]
    assert (packed.entries, packed.bytes, packed.unneeded) == (2, 2 * MB, MB)
    assert found["unfinished downloads"].bytes == MB // 2
    assert found["logs"].bytes == found["streams and queues"].bytes == MB // 4


def test_a_model_whose_file_is_gone_is_not_needed(tmp_path: Path) -> None:
    store, data = filled(tmp_path)
    (tmp_path / "files" / "m.gguf").unlink()
    found = {one.what: one for one in disk_use(store, data)}
    assert found["GGUF files elsewhere"].entries == 0
    assert found["packed weights"].unneeded == 2 * MB


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = filled(tmp_path)
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(store.cache))
    monkeypatch.setenv("RYZANSTEIN_DATA_DIR", str(data))
    shown = CliRunner().invoke(models_app, ["disk"]).output
    assert "`ryzanstein models clean` removes what is unneeded." in shown
    told = json.loads(CliRunner().invoke(models_app, ["disk", "--json"]).output)
    assert told["free"] > 0
    assert {one["what"]: one["bytes"] for one in told["places"]}["GGUF files elsewhere"] == 2 * MB


def test_a_machine_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path / "no" / "cache"))
    monkeypatch.setenv("RYZANSTEIN_DATA_DIR", str(tmp_path / "no" / "data"))
    done = CliRunner().invoke(models_app, ["disk"])
    assert done.exit_code == 0
    assert "unneeded." not in done.output

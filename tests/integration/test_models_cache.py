"""The model cache of a machine on which a stack runs: what its registry names is not removed."""

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli import target
from services.cli.commands.models.local import models_app
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, ModelLoadError
from shared.messages.registry import ModelSpec
from shared.model_store.catalog import read_manifest
from shared.model_store.locks import LOCKS, hold_model, lock_path
from shared.model_store.packed import ENDING, UNFINISHED, note_model
from shared.model_store.repository import MANIFEST, Manifest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.commands import Command
from tests.processes import nats_variables
from tests.unit.shared.model_store.hub_server import HubServer, Repository, serving

GGUF = "m-Q8_0.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With four models of a million bytes, the first of which was used longest ago."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(cache))
    monkeypatch.setenv("RYZANSTEIN_DATA_DIR", str(tmp_path / "data"))
    for used, name in enumerate(("org--old", "org--named@v1", "org--held", "org--new")):
        (cache / name).mkdir(parents=True)
        (cache / name / "config.json").write_text("{}")
        (cache / name / "model.safetensors").write_bytes(bytes(1_000_000))
        (cache / name / MANIFEST).write_bytes(msgspec.json.encode(Manifest(name, "", "c0")))
        lock_path(cache / name).parent.mkdir(exist_ok=True)
        lock_path(cache / name).touch()
        os.utime(lock_path(cache / name), (1000.0 + used, 1000.0 + used))
    return cache


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HubServer]]:
    with serving() as address:
        for name, value in (("HF_ENDPOINT", "http://127.0.0.1:1"), ("RYZANSTEIN_HUB_ENDPOINT", address)):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield HubServer


async def register(bus: Bus) -> None:
    registry = Bucket(bus, subjects.REGISTRY_BUCKET, ModelSpec)
    await registry.ensure()
    await registry.put("m", ModelSpec("m", "org/named", "v1"))


async def run(nats: CommonSettings, *arguments: str) -> str:
    return await Command(models_app, nats).run(*arguments)


def models(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("[!.]*")}


async def test_garbage_is_collected_by_the_registry(bus: Bus, nats_settings: CommonSettings, cache: Path) -> None:
    await register(bus)
    with hold_model(cache / "org--held", cache):
        said = json.loads(await run(nats_settings, "clean", "--to", "3.1MB", "--dry-run", "--json"))
        assert [model["model"] for model in said["removed"]] == ["org/old"]
        assert len(models(cache)) == 4
        said_plainly = await run(nats_settings, "clean", "--to", "0")
        assert "org/old" in said_plainly
        assert "2 MB were removed" in said_plainly
        assert models(cache) == {"org--named@v1", "org--held"}
    await run(nats_settings, "clean", "org/named@v1", "--dry-run")
    with hold_model(cache / "org--named@v1", cache), pytest.raises(ModelLoadError, match="is in use"):
        await run(nats_settings, "clean", "org/named@v1")
    await run(nats_settings, "clean", "org/named@v1")
    assert models(cache) == {"org--held"}
    with pytest.raises(ConfigurationError, match="holds no model org/named@v1"):
        await run(nats_settings, "clean", "org/named@v1")
    with pytest.raises(ConfigurationError, match="--to much is no size"):
        await run(nats_settings, "clean", "--to", "much")


def test_without_a_registry_it_must_be_said_that_none_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "CONNECT_TIMEOUT", 0.2)

    def clean(*arguments: str) -> BaseException | None:
        return CliRunner().invoke(models_app, ["clean", *arguments]).exception

    error = clean()
    assert isinstance(error, ConfigurationError)
    assert "give --unregistered" in error.message
    assert isinstance(clean("--nats-url", "nats://u:p@127.0.0.1:1"), BrokerUnavailable)
    assert len(models(cache)) == 4
    assert clean("--unregistered", "--to", "0") is None
    assert models(cache) == set()


@pytest.mark.parametrize("what", [["--unregistered"], ["org/old"]])
def test_a_cache_that_is_not_writable_says_so(cache: Path, what: list[str]) -> None:
    shutil.rmtree(cache / LOCKS)
    (cache / LOCKS).touch()  # a lock is the first thing that is written
    error = CliRunner().invoke(models_app, ["clean", *what]).exception
    assert isinstance(error, ModelLoadError)
    assert f"Nothing can be removed from the model cache {cache} (" in error.message
    assert len(models(cache)) == 4


async def test_a_pull_makes_room_for_itself(
    bus: Bus, nats_settings: CommonSettings, cache: Path, hub: type[HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mirror, which changes the file: that ends it before what comes is converted, which takes long."""
    await register(bus)
    for name, value in {**nats_variables(nats_settings), "RYZANSTEIN_MODEL_CACHE_BYTES": "4200000"}.items():
        monkeypatch.setenv(name, value)
    hub.repositories["org/next"] = Repository({}, branches={"v2": {GGUF: bytes(1_000_000)}})
    hub.faults.contents[GGUF] = [b"x" * 1_000_000] * 2
    command = ["pull", "org/next:Q8_0", "--revision", "v2"]
    result = await asyncio.to_thread(CliRunner().invoke, models_app, command)
    assert "is not what the hub lists" in str(result.exception), result.output
    assert models(cache) == {"org--named@v1", "org--held", "org--new"}
    assert hub.fetched == [GGUF, GGUF]
    assert read_manifest(cache / "org--new") is not None


def packed(directory: Path, name: str, model: Path | None, size: int, ending: str = ENDING) -> Path:
    """A file of packed weights as an executor writes it."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-0123456789abcdef{ending}"
    path.write_bytes(bytes(size))
    if model is not None:
        note_model(path, model)
    return path


def test_all_that_was_written_is_shown_and_removed(cache: Path, tmp_path: Path) -> None:
    """Packed weights of models that are gone, of killed writers and of earlier versions, and unfinished downloads."""
    own = packed(cache / ".packed", "new", cache / "org--new", 5_000_000)
    of_old = packed(cache / ".packed", "old", cache / "org--old", 6_000_000)
    lost = [
        packed(cache / ".packed", "gone", cache / "org--gone", 7_000_000),
        packed(cache / ".packed", "unknown", None, 8_000_000),
        packed(cache / ".packed", "killed", None, 9_000_000, UNFINISHED),
    ]
    written = packed(cache / ".packed", "written", None, 10_000_000, UNFINISHED)
    shutil.rmtree(cache / "org--held")
    (cache / "of-a-file").mkdir()
    (cache / "of-a-file" / "config.json").write_text("{}")
    (cache / "of-a-file" / "model.gguf").symlink_to(tmp_path / "deleted.gguf")
    (cache / "of-a-file" / MANIFEST).write_bytes(msgspec.json.encode(Manifest("of-a-file", "", "")))
    (cache / ".org--half.partial").mkdir()
    (cache / ".org--half.partial" / "part").write_bytes(bytes(2_000_000))
    os.utime(cache / ".org--half.partial", (1000.0, 1000.0))

    with written.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        listed = json.loads(CliRunner().invoke(models_app, ["list", "--cached", "--json"]).stdout)
        sizes = {model["name"]: model["packed"] for model in listed["models"]}
        assert sizes == {"of-a-file": 0, "org/named@v1": 0, "org/new": 5_000_000, "org/old": 6_000_000}
        assert [part["bytes"] for part in listed["unfinished"]] == [2_000_000]
        assert {one["file"]: one["needed"] for one in listed["packed"]} == {
            **{str(path): False for path in lost},
            str(written): True,
        }
        rows = CliRunner().invoke(models_app, ["list", "--cached"]).stdout
        assert "org/half (unfinished)" in rows
        assert f"{lost[0].name} (packed weights)" in rows

        command = ["clean", "--unregistered", "--to", "2.5MB", "--json"]
        told = json.loads(CliRunner().invoke(models_app, [*command, "--dry-run"]).stdout)["removed"]
        assert all(path.exists() for path in (own, of_old, *lost))
        assert json.loads(CliRunner().invoke(models_app, command).stdout)["removed"] == told
        assert {Path(one["directory"]).name for one in told} == {
            "of-a-file",
            "org--old",
            "org--half",
            of_old.name,
            *(path.name for path in lost),
        }
        assert {path.name for path in (cache / ".packed").iterdir()} == {
            own.name,
            own.with_suffix(".model").name,
            written.name,
        }
    assert CliRunner().invoke(models_app, ["clean", "org/new"]).exception is None
    assert [path.name for path in (cache / ".packed").iterdir()] == [written.name]

"""The model cache of a machine on which a stack runs: what its registry names is not removed."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.commands.models.local import models_app
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, ModelLoadError
from shared.messages.registry import ModelSpec
from shared.model_store.catalog import read_manifest
from shared.model_store.locks import LOCKS, hold_model, lock_path
from shared.model_store.repository import MANIFEST, Manifest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
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
    address = nats.nats_url.removeprefix("nats://")
    url = f"nats://{nats.nats_user}:{nats.nats_password.get_secret_value()}@{address}"
    command = [*arguments, "--nats-url", url]
    result = await asyncio.to_thread(CliRunner().invoke, models_app, command)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def models(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("[!.]*")}


async def test_garbage_is_collected_by_the_registry(
    bus: Bus, nats_settings: CommonSettings, cache: Path
) -> None:
    await register(bus)
    with hold_model(cache / "org--held", cache):
        said = json.loads(await run(nats_settings, "gc", "--to", "3.1MB", "--dry-run", "--json"))
        assert [model["model"] for model in said["removed"]] == ["org/old"]
        assert len(models(cache)) == 4
        said_plainly = await run(nats_settings, "gc", "--to", "0")
        assert "org/old" in said_plainly
        assert "2 MB were removed" in said_plainly
        assert models(cache) == {"org--named@v1", "org--held"}
    await run(nats_settings, "gc", "org/named@v1", "--dry-run")
    with hold_model(cache / "org--named@v1", cache), pytest.raises(ModelLoadError, match="is in use"):
        await run(nats_settings, "gc", "org/named@v1")
    await run(nats_settings, "gc", "org/named@v1")
    assert models(cache) == {"org--held"}
    with pytest.raises(ConfigurationError, match="holds no model org/named@v1"):
        await run(nats_settings, "gc", "org/named@v1")
    with pytest.raises(ConfigurationError, match="--to much is no size"):
        await run(nats_settings, "gc", "--to", "much")


def test_without_a_registry_it_must_be_said_that_none_counts(cache: Path) -> None:
    def gc(*arguments: str) -> BaseException | None:
        return CliRunner().invoke(models_app, ["gc", *arguments]).exception

    error = gc()
    assert isinstance(error, ConfigurationError)
    assert "give --unregistered" in error.message
    assert isinstance(gc("--nats-url", "nats://u:p@127.0.0.1:1"), BrokerUnavailable)
    assert len(models(cache)) == 4
    assert gc("--unregistered", "--to", "0") is None
    assert models(cache) == set()


@pytest.mark.parametrize("what", [["--unregistered"], ["org/old"]])
def test_a_cache_that_is_not_writable_says_so(cache: Path, what: list[str]) -> None:
    shutil.rmtree(cache / LOCKS)
    (cache / LOCKS).touch()  # a lock is the first thing that is written
    error = CliRunner().invoke(models_app, ["gc", *what]).exception
    assert isinstance(error, ModelLoadError)
    assert f"Nothing can be removed from the model cache {cache} (" in error.message
    assert len(models(cache)) == 4


async def test_a_pull_makes_room_for_itself(
    bus: Bus,
    nats_settings: CommonSettings,
    cache: Path,
    hub: type[HubServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a mirror, which changes the file: that ends it before what comes is converted, which takes long."""
    await register(bus)
    monkeypatch.setenv("RYZANSTEIN_NATS_URL", nats_settings.nats_url)
    monkeypatch.setenv("RYZANSTEIN_NATS_USER", nats_settings.nats_user)
    monkeypatch.setenv("RYZANSTEIN_NATS_PASSWORD", nats_settings.nats_password.get_secret_value())
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE_BYTES", "4200000")
    hub.repositories["org/next"] = Repository({}, branches={"v2": {GGUF: bytes(1_000_000)}})
    hub.faults.contents[GGUF] = [b"x" * 1_000_000] * 2
    command = ["pull", "org/next:Q8_0", "--revision", "v2"]
    result = await asyncio.to_thread(CliRunner().invoke, models_app, command)
    assert "is not what the hub lists" in str(result.exception), result.output
    assert models(cache) == {"org--named@v1", "org--held", "org--new"}
    assert hub.fetched == [GGUF, GGUF]
    assert read_manifest(cache / "org--new") is not None

"""What a host refuses of an adapter before anything is stored, each with the reason."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.host import adapters
from services.executor.supervisor.host.adapters import HostAdapters
from shared.errors import ConfigurationError, InvalidRequest, ModelLoadError, RyzansteinError
from shared.messages import PullAdapter
from shared.messages.registry import ModelSpec
from shared.nats.adapters import CONFIG, CONFIG_BYTES, WEIGHTS

NO_BUS: Any = None  # nothing is stored


def adapter(path: Path, config: bytes = b'{"r": 8}', weights: bytes = b"weights") -> Path:
    path.mkdir()
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


async def refusal(path: Path, kind: type[RyzansteinError], **settings: Any) -> str:
    settings = {"model": "m", "engine": "stub", "model_directories": str(path.parent), **settings}
    command = PullAdapter("sql", "m", str(path), ModelSpec("m", "m"))
    with pytest.raises(kind) as caught:
        await HostAdapters().pull(command, ExecutorSettings(**settings), NO_BUS)
    return str(caught.value)


async def test_a_model_that_takes_none_or_is_not_stored(tmp_path: Path) -> None:
    path = adapter(tmp_path / "adapter")
    assert "takes no adapters" in await refusal(path, InvalidRequest, max_adapters=0)
    told = await refusal(path, ConfigurationError, engine="torch", model=str(tmp_path / "none"))
    assert "is not stored on this host" in told


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (b"{", "adapter_config.json of the adapter is not one that peft writes"),
        (b'{"r": 65}', "has the rank 65, and the executor takes 64 at most"),
        (b" " * (CONFIG_BYTES + 1), f"has more than {CONFIG_BYTES} bytes"),
    ],
)
async def test_a_configuration_that_is_none(tmp_path: Path, config: bytes, told: str) -> None:
    assert told in await refusal(adapter(tmp_path / "adapter", config), ModelLoadError)


def test_without_pytorch_it_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="with PyTorch, which this executor's environment does not have; install"):
        adapters.inspect_adapter(tmp_path, tmp_path, 64)


async def test_whoever_asks_again_waits_for_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []

    async def prepare(source: str, *rest: object, **more: object) -> Path:
        prepared.append(source)
        return Path(source)

    monkeypatch.setattr("services.executor.supervisor.host.adapters.prepare_adapter", prepare)
    settings: Any = {"model": "m", "engine": "stub", "model_directories": str(tmp_path)}
    path = str(adapter(tmp_path / "adapter", b"{"))
    host, settings = HostAdapters(), ExecutorSettings(**settings)
    commands = [PullAdapter(name, "m", path, ModelSpec("m", "m")) for name in ("sql", "sql", "other")]
    told = await asyncio.gather(*(host.pull(command, settings, NO_BUS) for command in commands), return_exceptions=True)
    assert [type(one) for one in told] == [ModelLoadError] * 3
    assert prepared == [path, path]
    with pytest.raises(ModelLoadError):
        await host.pull(commands[0], settings, NO_BUS)
    assert prepared == [path] * 3, "what has ended is begun anew"


async def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "adapter")

    def broken(*paths: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "copyfile", broken)
    assert "cannot be read (Input/output error)" in await refusal(path, ModelLoadError)

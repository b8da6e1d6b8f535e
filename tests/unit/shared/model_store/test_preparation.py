"""A model is made ready in a process that can be ended at any time."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.errors import InternalError, ModelLoadError
from shared.model_store.catalog import DEFAULT_MODEL
from shared.model_store.locks import LOCKS
from shared.model_store.preparation import prepare_model
from shared.model_store.settings import Store


def ignore(stage: str, done: int, total: int) -> None:
    pass


async def test_name_and_directory_come_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = await prepare_model(str(tmp_path / "model"), Store.at(tmp_path / "cache"), ignore)
    assert found == ("model", tmp_path / "model")


async def test_what_is_there_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pulled--model", DEFAULT_MODEL):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr("shared.model_store.preparation._process", None)
    assert await prepare_model("pulled/model", Store.at(tmp_path), ignore) == (
        "pulled/model",
        tmp_path / "pulled--model",
    )
    assert await prepare_model(DEFAULT_MODEL.lower(), Store.at(tmp_path), ignore) == (
        DEFAULT_MODEL,
        tmp_path / DEFAULT_MODEL,
    )


async def test_errors_come_back_as_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist; check the path"):
        await prepare_model(str(tmp_path / "none.gguf"), Store.at(tmp_path), ignore)


async def test_a_process_that_breaks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InternalError, match=r"could not be made ready \(.*broken on purpose\)"):
        await prepare_model("model", Store.at(tmp_path), ignore)


@pytest.fixture
def silent_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A package index that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server


def words_of(process: psutil.Process) -> list[str]:
    """Of its command; none of one that has ended, such as another test's that nobody has waited for."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


async def test_a_download_that_hangs_ends_when_told(tmp_path: Path, silent_index: socket.socket) -> None:
    task = asyncio.create_task(prepare_model(DEFAULT_MODEL, Store.at(tmp_path / "cache"), ignore))
    connection, _ = await asyncio.to_thread(silent_index.accept)
    with connection:
        children = psutil.Process().children(recursive=True)  # those of other tests too
        processes = [child for child in children if "pip" in words_of(child)]
        assert processes
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await task
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [LOCKS], "no half model"

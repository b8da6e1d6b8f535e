"""An executor that is started before it is known what it is to serve."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.cli.supervision import early_executor
from services.cli.supervision.nats_server import stop_process
from services.cli.supervision.stack import Child
from services.executor.supervisor.ranks.early_fork_server import BUILDERS
from services.executor.supervisor.ranks.fork_server import ImportModules

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="early executors are for Linux")


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is started only says what it was told."""
    monkeypatch.setattr(early_executor, "MODULE", "tests.unit.cli.supervision.waiting_executor")
    monkeypatch.setattr(early_executor, "_NVIDIA", Path("/nowhere"))
    for name in ("RYZANSTEIN_ENGINE", "RYZANSTEIN_FORK_SERVER"):
        monkeypatch.delenv(name, raising=False)
    yield
    early_executor.end()


def child(directory: Path, service: str = "executor", **environment: str) -> Child:
    return Child(service, f"{service}-0", ["--group", "é"], directory / "a.log", environment)


async def test_the_executor_is_the_one_that_was_started_early(tmp_path: Path) -> None:
    early_executor.start_early(["--model", "m"])
    (early,) = early_executor._early
    executor = child(tmp_path)
    executor.log.write_text("before\n")
    await executor.start({**os.environ, "TOLD": "\udcff"})
    assert executor.pid == early.pid
    assert executor.returncode is None
    assert await asyncio.gather(executor.wait(), executor.wait()) == [0, 0]
    before, said = executor.log.read_text().splitlines()
    assert before == "before"
    assert json.loads(said) == [["--group", "é"], "\udcff", "executor-0", "", ""]
    assert early_executor.take() is None, "it is there for one start"


async def test_what_makes_weights_is_imported_while_it_waits(tmp_path: Path) -> None:
    early_executor.start_early([])
    early_executor.expect_building()
    executor = child(tmp_path)
    await executor.start({**os.environ, "TOLD": "more"})
    assert await executor.wait() == 0
    arguments, *_, asked = json.loads(executor.log.read_text())
    assert arguments == ["--group", "é"]
    assert msgspec.json.decode(asked, type=ImportModules) == ImportModules(BUILDERS)


def test_one_that_is_told_nothing_ends_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    early = early_executor.start()
    early.close()
    assert early.returncode == 0
    assert capfd.readouterr() == ("", "")


async def test_one_that_has_ended_is_not_taken(tmp_path: Path) -> None:
    early_executor.start_early([])
    (early,) = early_executor._early
    await stop_process(early, 0.0)
    assert early.returncode is not None
    assert early_executor.take() is None
    with pytest.raises(BrokenPipeError):
        early.tell([], {}, tmp_path / "log")


def test_others_and_executors_with_gpus_of_their_own_do_not_take_it(tmp_path: Path) -> None:
    early_executor.start_early([])
    assert child(tmp_path, "gateway")._started_early({}) is None
    assert child(tmp_path, CUDA_VISIBLE_DEVICES="1")._started_early({}) is None
    assert len(early_executor._early) == 1


@pytest.mark.parametrize("words", [["--engine", "stub"], ["--engine=stub"], ["--help"]])
def test_none_is_started_where_it_is_of_no_use(words: list[str]) -> None:
    early_executor.start_early(words)
    assert not early_executor._early


def test_none_is_started_where_settings_or_gpus_ask_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("RYZANSTEIN_ENGINE", "stub")
        early_executor.start_early([])
    monkeypatch.setattr(early_executor, "_NVIDIA", Path("/"))
    early_executor.start_early([])
    assert not early_executor._early

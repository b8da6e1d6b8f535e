"""A rank that was killed and does not end."""

import asyncio
from typing import Any

import pytest

from services.executor.supervisor import ring


class Process:
    """One that ends when it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def wait(self) -> int:
        await self.let_go.wait()
        return -9


class Log:
    """What is told, as it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def warning(self, event: str, *, rank: int, reason: str) -> None:
        assert "dmesg" in reason
        self.told.put_nowait((event, rank))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(ring, "KILL_PATIENCE", 0.0)
    monkeypatch.setattr(ring, "log", log)
    return log


async def test_it_is_waited_for_and_told_of_once(log: Log) -> None:
    process: Any = Process()
    waiting = asyncio.create_task(ring._gone(3, process))
    assert await log.told.get() == ("rank_kill_timed_out", 3)
    assert not waiting.done()
    process.let_go.set()
    await waiting
    assert log.told.empty()


async def test_one_that_has_ended_is_not_told_of(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "KILL_PATIENCE", 10.0)
    process: Any = Process()
    process.let_go.set()
    await ring._gone(0, process)
    assert log.told.empty()

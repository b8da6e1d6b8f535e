"""What is told of a ring that has ended, when several things were seen at once, and of a rank that does not end."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import Failed
from services.executor.supervisor import ring
from services.executor.supervisor.group import MOST_DEATHS, GroupSupervisor
from services.executor.supervisor.ring import Ring, RingEnd
from shared.config import load_settings
from shared.errors import RingLost

MISSED = Failed(RingLost.code, "A rank of the ring is gone (connection reset).", missed=True)


class Ended:
    """A process that has ended."""

    where = "on host 1"

    def __init__(self, code: int) -> None:
        self._code = code

    async def wait(self) -> int:
        return self._code


@pytest.fixture
async def made() -> AsyncIterator[Ring]:
    host: Any = SimpleNamespace(activity=None)
    made = Ring(load_settings(ExecutorSettings, engine="stub", tp=2), "g", host, 1, None, {})
    for rank in range(2):
        made._events[rank] = asyncio.create_task(asyncio.sleep(0))
    yield made
    await made.kill()


async def end_of(made: Ring) -> RingEnd:
    async with asyncio.timeout(10):
        return await made.wait_end()


async def exits(made: Ring, rank: int, code: int) -> None:
    process: Any = Ended(code)
    await made._follow_exit(rank, process)


async def test_the_rank_that_ended_is_named_although_another_missed_it_first(made: Ring) -> None:
    made._on_event(0, MISSED)
    await exits(made, 0, 1)
    await exits(made, 1, -9)
    assert await end_of(made) == RingEnd("died", "rank 1 (on host 1) ended with signal SIGKILL")


async def test_who_missed_another_is_told_where_none_has_ended(made: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "NAMING_PATIENCE", 0.01)
    made._on_event(0, MISSED)
    await exits(made, 0, 1)
    await exits(made, 1, 0)  # it is told nothing any more, and leaves
    assert await end_of(made) == RingEnd("failed", MISSED.message, MISSED.code)


@pytest.mark.parametrize(
    ("code", "message"), [("model_load_error", "No weights."), (RingLost.code, "Fatal CUDA error on rank 1.")]
)
async def test_what_a_rank_says_of_itself_is_told_at_once(made: Ring, code: str, message: str) -> None:
    made._on_event(1, Failed(code, message))
    await exits(made, 0, -6)
    assert await end_of(made) == RingEnd("failed", message, code)


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


async def test_a_killed_rank_is_waited_for_and_told_of_once(log: Log) -> None:
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


@pytest.mark.parametrize(
    ("url", "remedy"), [("", "at the memory that the model needs."), ("http://a:1", "at that server.")]
)
def test_a_ring_that_never_got_ready_is_given_up_with_what_to_look_at(url: str, remedy: str) -> None:
    settings = ExecutorSettings(model="m", engine_url=url, engine_kind="vllm")
    group = SimpleNamespace(ready=asyncio.Event(), settings=settings, _deaths=MOST_DEATHS - 1)
    end = RingEnd("died", "it cannot be reached")
    assert GroupSupervisor._final(group, end) is None  # type: ignore[arg-type]
    group._deaths += 1
    error = GroupSupervisor._final(group, end)  # type: ignore[arg-type]
    assert str(error).endswith(f"because it cannot be reached. Look into the log above, and {remedy}")

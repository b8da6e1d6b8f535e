"""When trainers of a host are suspended, and when they go on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.executor.ipc.activity import ActivityPage, HostActivity
from services.executor.supervisor.trainings.suspension import QUIET, Suspension


class Trainer:
    def __init__(self) -> None:
        self.is_suspended = False

    def suspend(self) -> None:
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False

    def suspended_for(self) -> float:
        return 2.0 if self.is_suspended else 0.0


class Host:
    def __init__(self, path: Path) -> None:
        self.page: ActivityPage | None = ActivityPage(path)
        self.leaders = HostActivity(path)
        self.trainers: dict[str, Trainer] = {}
        self.suspension = Suspension(lambda: self.page, self.trainers)

    def start(self, name: str) -> Trainer:
        made = self.trainers[name] = Trainer()
        self.suspension.started(made)
        return made

    async def until(self, *suspended: bool, armed: bool = False) -> None:
        """Waits until its trainers are so, and the page too where it is to be `armed`."""
        async with asyncio.timeout(60):
            while [one.is_suspended for one in self.trainers.values()] != [*suspended] or (  # noqa: ASYNC110
                armed and not self.leaders.is_armed
            ):
                await asyncio.sleep(0.001)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path / "page")
    yield made
    await made.suspension.close()


async def test_all_are_suspended_by_one_request_and_later_ones_too(host: Host) -> None:
    host.start("a")
    host.start("b")
    await host.until(False, False, armed=True)
    host.leaders.set(1, 1)
    host.suspension.begin()
    assert [one.is_suspended for one in host.trainers.values()] == [True, True]
    assert host.suspension.seconds() == 4.0
    assert host.start("c").is_suspended
    host.leaders.set(1, 0)
    assert host.start("d").is_suspended, "it has been idle for a moment alone"
    await host.until(False, False, False, False, armed=True)
    assert host.suspension.seconds() == 0.0


async def test_a_request_that_told_nobody_is_seen(host: Host) -> None:
    """It came while the first trainer was being started: the page was not armed yet."""
    first = host.start("a")
    assert not first.is_suspended
    host.leaders.set(1, 1)
    await host.until(True)
    host.leaders.set(1, 0)
    await host.until(False)


async def test_a_request_that_is_gone_at_the_next_look_counts(host: Host) -> None:
    """Trainers go on after a while in which nobody waited; each further request begins it anew."""
    loop = asyncio.get_running_loop()
    host.start("a")
    await host.until(False, armed=True)
    for _ in range(3):
        host.suspension.begin()
        began = loop.time()
        assert host.trainers["a"].is_suspended
        await asyncio.sleep(QUIET / 2)
    await host.until(False)
    assert loop.time() - began >= QUIET


async def test_the_page_is_armed_while_it_is_idle_and_by_a_ring_s_end(host: Host) -> None:
    host.leaders.set(1, 1)
    assert host.start("a").is_suspended
    assert not host.leaders.is_armed
    host.leaders.set(1, 0)
    await host.until(False, armed=True)
    host.leaders.disarm()  # by a leader that then dies with what it has told
    page = host.page
    page.give_back(1)
    assert host.leaders.is_armed


async def test_without_trainers_or_a_page_nothing_is_looked_at(host: Host) -> None:
    host.suspension.begin()
    trainer = host.start("a")
    await host.until(False, armed=True)
    host.page = None
    other = Suspension(lambda: None, host.trainers)
    other.started(trainer)
    assert not trainer.is_suspended
    await other.close()

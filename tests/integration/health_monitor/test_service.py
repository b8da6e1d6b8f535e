"""The health monitor on a real NATS: heartbeats in, records and events out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.health_monitor.service import HealthMonitorService, HealthMonitorSettings
from shared.config import CommonSettings
from shared.messages import (
    GroupBeat,
    GroupEvent,
    GroupLoad,
    GroupRecord,
    Heartbeat,
    HostBeat,
    HostModel,
    HostRecord,
    RankBeat,
    ServiceRecord,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.processes import service_process
from tests.running import running

LOAD = GroupLoad(running=1, free_blocks=3, total_blocks=4)


def monitor_settings(common: CommonSettings) -> HealthMonitorSettings:
    # A second, in which beats of this process are late where it has many neighbours.
    return HealthMonitorSettings(
        **common.model_dump(), hung_after=1.0, gone_after=1.0, forget_after=0.5, load_interval=0.1
    )


def monitor(common: CommonSettings) -> contextlib.AbstractAsyncContextManager[HealthMonitorService]:
    return running(HealthMonitorService(monitor_settings(common)))


class Executor:
    """An executor's heartbeats."""

    def __init__(self, bus: Bus, group: str = "g") -> None:
        self._bus = bus
        self.group = group
        self.epoch = 1
        self.progress = 0
        self.moving = True
        self.state = "ready"
        self.ranks = True
        self._task: asyncio.Task[None] | None = None

    async def beat(self, service: str = "ready") -> None:
        self.progress += self.moving
        ranks = [RankBeat(0, 11, 1, self.progress, True)] if self.ranks else []
        said = GroupBeat(self.group, "m", self.epoch, self.state, ranks, LOAD)  # type: ignore[arg-type]
        beat = Heartbeat("executor", f"executor-{self.group}", 10, service, "", said)  # type: ignore[arg-type]
        await self._bus.publish(subjects.beats("executor", beat.instance), beat)

    async def _live(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.05)

    def start(self) -> None:
        self._task = asyncio.create_task(self._live())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Seen:
    """Everything that monitors say."""

    def __init__(self, bus: Bus) -> None:
        self.events: list[tuple[str, int, str]] = []
        self.times: list[float] = []  # of the events: when each was so, as it says
        self.groups: dict[str, GroupRecord] = {}
        self.services: dict[str, ServiceRecord] = {}
        self._bus = bus
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, self._on_event)
        groups = await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)
        services = await Bucket.open(self._bus, subjects.SERVICES_BUCKET, ServiceRecord)
        self._tasks = [
            asyncio.create_task(self._follow(groups, self.groups)),
            asyncio.create_task(self._follow(services, self.services)),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(15), self._news:
            await self._news.wait_for(holds)

    async def until_state(self, group: str, state: str, epoch: int = 1) -> None:
        await self.until(
            lambda: (record := self.groups.get(group)) is not None and (record.state, record.epoch) == (state, epoch)
        )

    async def _on_event(self, event: GroupEvent) -> None:
        async with self._news:
            self.events.append((event.group, event.epoch, event.kind))
            self.times.append(event.at)
            self._news.notify_all()

    async def _follow(self, bucket: Bucket, into: dict) -> None:  # type: ignore[type-arg]
        async for update in bucket.watch():
            if update is None:
                continue
            async with self._news:
                key, value = update
                if value is None:
                    into.pop(key, None)
                else:
                    into[key] = value
                self._news.notify_all()


@pytest.fixture
async def seen(bus: Bus) -> AsyncIterator[Seen]:
    watcher = Seen(bus)
    await watcher.start()
    yield watcher
    await watcher.stop()


@pytest.fixture
async def executor(bus: Bus) -> AsyncIterator[Executor]:
    fake = Executor(bus)
    yield fake
    await fake.stop()


async def test_hosts_are_written_and_forgotten_as_services_are(bus: Bus, nats_settings: CommonSettings) -> None:
    bucket = await Bucket.open(bus, subjects.HOSTS_BUCKET, HostRecord)
    host = HostBeat(memory=100, models=[HostModel("m", "loading")], takes_models=True)
    beat = Heartbeat("executor", "empty", 1, "ready", host=host)
    async with monitor(nats_settings):
        seen: list[str] = []
        async with asyncio.timeout(15):
            async for update in bucket.watch():
                if update is None:  # it watches: nothing that is written and deleted from now on is missed
                    await bus.publish(subjects.beats("executor", "empty"), beat)
                else:
                    seen.append("forgotten" if update[1] is None else update[1].state)
                    assert update[1] is None or update[1].host == host
                if seen[-1:] == ["forgotten"]:
                    break
        assert list(dict.fromkeys(seen)) == ["ready", "gone", "forgotten"]


@pytest.mark.slow
async def test_a_ring_comes_hangs_recovers_restarts_and_goes(
    nats_settings: CommonSettings, seen: Seen, executor: Executor
) -> None:
    async with monitor(nats_settings) as service:
        executor.start()
        await seen.until_state("g", "ready")
        record = seen.groups["g"]
        assert (record.model, record.load, record.ranks[0].pid) == ("m", LOAD, 11)
        assert record.updated_at > 0
        await seen.until(lambda: "executor-g" in seen.services and service.instance in seen.services)

        executor.moving = False
        await seen.until_state("g", "hung")
        executor.moving = True
        await seen.until_state("g", "ready")

        executor.state, executor.ranks = "starting", False
        await seen.until_state("g", "starting")
        executor.epoch, executor.state, executor.ranks = 2, "ready", True
        await seen.until_state("g", "ready", epoch=2)

        executor.state = "draining"
        await seen.until_state("g", "draining", epoch=2)
        await executor.stop()
        await executor.beat("gone")
        await seen.until_state("g", "gone", epoch=2)
        assert seen.services["executor-g"].state in ("ready", "gone")
        await seen.until(lambda: not seen.groups and "executor-g" not in seen.services)
    assert seen.events == [
        ("g", 1, "up"),
        ("g", 1, "down"),
        ("g", 1, "up"),
        ("g", 1, "down"),
        ("g", 2, "up"),
        ("g", 2, "draining"),
        ("g", 2, "down"),
    ]


async def test_load_follows_without_a_change_of_state(
    nats_settings: CommonSettings, seen: Seen, executor: Executor
) -> None:
    async with monitor(nats_settings):
        executor.start()
        await seen.until_state("g", "ready")
        steps = seen.groups["g"].ranks[0].progress
        await seen.until(lambda: seen.groups["g"].ranks[0].progress > steps + 3)


async def test_a_new_monitor_goes_on_where_the_last_one_stopped(
    nats_settings: CommonSettings, seen: Seen, executor: Executor
) -> None:
    async with monitor(nats_settings):
        executor.start()
        await seen.until_state("g", "ready")
        await executor.stop()
    async with monitor(nats_settings):
        await seen.until_state("g", "gone")
        await seen.until(lambda: ("g", 1, "down") in seen.events)
    assert seen.events == [("g", 1, "up"), ("g", 1, "down")]


async def test_two_monitors_agree(nats_settings: CommonSettings, seen: Seen, executor: Executor) -> None:
    async with monitor(nats_settings) as first, monitor(nats_settings) as second:
        executor.start()
        await seen.until_state("g", "ready")
        await seen.until(lambda: {first.instance, second.instance} <= set(seen.services))
        await executor.stop()
        await seen.until_state("g", "gone")
        await seen.until(lambda: ("g", 1, "down") in seen.events)
    assert set(seen.events) == {("g", 1, "up"), ("g", 1, "down")}


async def test_metrics_are_served(nats_settings: CommonSettings, seen: Seen, executor: Executor) -> None:
    async with monitor(nats_settings) as service:
        executor.start()
        await seen.until_state("g", "ready")
        host, port = service.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    assert 'ryzanstein_health_groups{state="ready"} 1.0' in text
    assert 'ryzanstein_health_beats_total{service="executor"}' in text


async def test_the_process_starts_and_ends_in_order(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen, executor: Executor
) -> None:
    module = "services.health_monitor"
    async with service_process(bus, nats_settings, module, tmp_path, instance="monitor", forked=False) as process:
        executor.start()
        await seen.until_state("g", "ready")
        await seen.until(lambda: "monitor" in seen.services and seen.services["monitor"].state == "ready")
        assert seen.services["monitor"].pid == process.process.pid
        assert await process.end() == 0

"""What is told of a ring against what stands in the bucket, with monitors that write when a test lets them."""

from typing import Any, cast

from prometheus_client import CollectorRegistry

from services.health_monitor.detector import Detector
from services.health_monitor.metrics import HealthMetrics
from services.health_monitor.registry import Registry, SharedRecords
from shared.messages import GroupBeat, GroupEvent, GroupLoad, GroupRecord, Heartbeat, RankBeat
from shared.nats.kv import KvEntry

UNIX = 1_000_000.0


def beat(service: Any = "ready", progress: int = 1) -> Heartbeat:
    ring = GroupBeat("g", "m", 1, "ready", [RankBeat(0, 11, 1, progress, True)], GroupLoad(running=1))
    return Heartbeat("executor", "executor-1", 10, service, "", ring)


class Broker:
    """One bucket with compare-and-set, and the events that were published."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.record: GroupRecord | None = None
        self._revision = 0

    async def publish(self, subject: str, event: GroupEvent) -> None:
        self.told.append(event.kind)

    async def create(self, key: str, record: GroupRecord) -> int | None:
        return await self.update(key, record, 0)

    async def update(self, key: str, record: GroupRecord, revision: int) -> int | None:
        if revision != self._revision:
            return None
        self._revision += 1
        self.record = record
        return self._revision

    async def get(self, key: str) -> KvEntry[GroupRecord] | None:
        return KvEntry("g", self.record, self._revision) if self.record is not None else None


class Monitor:
    def __init__(self, broker: Broker) -> None:
        self.seen = Detector(hung_after=2.5, gone_after=4.0, forget_after=60.0)
        metrics = HealthMetrics(CollectorRegistry())
        groups = SharedRecords[GroupRecord](cast(Any, broker), 1.0, metrics, self._learn, lambda key: None)
        none = SharedRecords[Any](cast(Any, broker), 1.0, metrics, lambda record: None, lambda key: None)
        self._registry = Registry(cast(Any, broker), metrics, groups, none, none)

    def _learn(self, record: GroupRecord) -> None:
        self.seen.merge(record, 0.0, UNIX)

    async def hear(self, heard: Heartbeat, at: float = 0.0) -> None:
        await self._registry.announce(self.seen.observe(heard, at, UNIX + at))

    async def write(self, at: float = 0.0) -> None:
        await self._registry.write([], self.seen.groups(), [], at)


async def test_a_monitor_that_was_stopped_does_not_tell_that_a_lost_ring_is_up() -> None:
    """It has the ring's first heartbeat still to read when another one has written the ring's end."""
    broker = Broker()
    stopped, other = Monitor(broker), Monitor(broker)
    await other.hear(beat())
    await other.write()
    await other.hear(beat("gone"))
    await other.write()
    await stopped.hear(beat())
    await stopped.write()
    await stopped.write()
    assert broker.told == ["up", "down"]
    assert broker.record is not None
    assert broker.record.state == "gone"


async def test_a_ring_is_told_to_be_up_once_that_is_written_and_to_be_down_at_once() -> None:
    broker = Broker()
    monitor, other = Monitor(broker), Monitor(broker)
    await monitor.hear(beat())
    assert broker.told == []
    await monitor.write()
    assert broker.told == ["up"]
    await monitor.hear(beat("gone"))
    assert broker.told == ["up", "down"]
    await monitor.write()
    await other.hear(beat(progress=2), 1.0)  # it was heard again, later than what stands there says
    await other.write(1.0)
    assert broker.told == ["up", "down"], "the other one did not know what stood there"
    await other.write(1.0)
    assert broker.told == ["up", "down", "up"]


async def test_what_is_down_before_that_it_is_up_was_written_is_never_told_to_be_up() -> None:
    broker = Broker()
    monitor = Monitor(broker)
    await monitor.hear(beat())
    await monitor.hear(beat("gone"))
    await monitor.write()
    await monitor.write()
    assert broker.told == ["down"]

"""The health monitor service and its settings: heartbeats and the broker's own news in, group states out."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog
from nats.aio.msg import Msg
from pydantic import Field

from services.health_monitor.detector import Clocks, ConnectionEvent, Detector
from services.health_monitor.metrics import HealthMetrics, StreamPoll
from services.health_monitor.registry import Registry, SharedRecords
from shared.config import CommonSettings
from shared.messages import GroupRecord, Heartbeat, HostRecord, ServiceRecord
from shared.nats import subjects
from shared.nats.kv import Bucket
from shared.service.lifecycle import Service


class HealthMonitorSettings(CommonSettings):
    """What a health monitor needs to know beside the common settings."""

    hung_after: float = Field(default=2.5, gt=0)
    """Seconds without progress after which a rank with a step in flight counts as hung, and its group gets no more
    requests. Detected from heartbeats: within this time and two of them. Executors read the same variable, and kill
    such a ring; where it is unset they wait half a second longer than the monitor. Progress is told layer by layer:
    set it above what the longest layer takes."""
    gone_after: float = Field(default=4.0, gt=0)
    """Seconds without a heartbeat after which an instance counts as gone. A killed one is known at once where the
    broker reports closed connections."""
    forget_after: float = Field(default=60.0, gt=0)
    """Seconds for which an instance or group that is gone is still listed."""
    load_interval: float = Field(default=1.0, ge=0)
    """Seconds, at least, between two records of a group's load; a change of state is written at once."""


log = structlog.get_logger(__name__)

TICK = 0.25  # seconds between two looks at who has not been heard of, and sooner where somebody's time is up
SOONEST = 0.02  # seconds before the next look, where somebody's time is up at once
GATHER = 0.05  # seconds in which changes are gathered before they are written: bad news does not wait for it


class HealthMonitorService(Service):
    """Says who is alive, busy, hung or gone. Several may run side by side."""

    name = "health-monitor"

    def __init__(self, settings: HealthMonitorSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._metrics = HealthMetrics(self.registry)
        self._detector = Detector(
            hung_after=settings.hung_after, gone_after=settings.gone_after, forget_after=settings.forget_after
        )
        self._clocks = Clocks()
        self._registry: Registry | None = None
        self._dirty = asyncio.Event()
        # What the gauges say:
        self._instances: Sequence[tuple[str, str, str]] = []
        self._groups: Sequence[tuple[str, str, str, float, bool]] = []
        self._ahead: Sequence[tuple[str, float]] = []

    async def start(self) -> None:
        clock = asyncio.get_running_loop().time
        bus, metrics, detector = self.bus, self._metrics, self._detector
        interval = self._settings.load_interval
        groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
        services = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        hosts = await Bucket.open(bus, subjects.HOSTS_BUCKET, HostRecord)
        registry = self._registry = Registry(
            bus,
            metrics,
            SharedRecords(groups, interval, metrics, self._on_group, lambda key: detector.drop(group=key)),
            SharedRecords(services, interval, metrics, self._on_service, lambda key: detector.drop(instance=key)),
            # It is there for as long as the service is.
            SharedRecords(hosts, interval, metrics, self._on_host, lambda key: None),
        )
        now = clock()
        known = (await registry.services.load(now), await registry.groups.load(now))
        detector.restore(*known, now, await registry.hosts.load(now))
        self.bus.on_reconnect(lambda: self._detector.restart_timeouts(clock()))
        await self.bus.subscribe(subjects.ALL_BEATS, Heartbeat, self._on_beat)
        await self.bus.client.subscribe(subjects.CONNECTION_OPENED, cb=self._on_opened)
        await self.bus.client.subscribe(subjects.CONNECTION_CLOSED, cb=self._on_closed)
        self.spawn(registry.groups.follow(clock), "groups")
        self.spawn(registry.services.follow(clock), "services")
        self.spawn(registry.hosts.follow(clock), "hosts")
        self.spawn(StreamPoll(self.bus, self._metrics).run(), "streams")
        self.spawn(self._tick(), "tick")
        self.spawn(self._write(registry), "registry")

    async def stop(self) -> None:
        """Nothing is lost: the buckets keep what is known, another monitor goes on from there."""

    async def _on_beat(self, beat: Heartbeat) -> None:
        assert self._registry is not None, "the registry is opened before beats arrive"
        self._metrics.beats.labels(beat.service).inc()
        self._clocks.observe(beat.instance, beat.sent_at, time.time())
        events = self._detector.observe(beat, asyncio.get_running_loop().time(), time.time())
        await self._registry.announce(events)
        self._dirty.set()

    def _on_group(self, record: GroupRecord) -> None:
        """Another monitor has written it."""
        self._detector.merge(record, asyncio.get_running_loop().time(), time.time())
        self._dirty.set()

    def _on_service(self, record: ServiceRecord) -> None:
        """Another monitor has written it."""
        self._detector.merge_service(record, asyncio.get_running_loop().time(), time.time())
        self._dirty.set()

    def _on_host(self, record: HostRecord) -> None:
        """Another monitor has written it."""
        self._detector.merge_host(record)
        self._dirty.set()

    async def _on_opened(self, message: Msg) -> None:
        event = _decoded(message)
        if event is not None:
            self._detector.opened(event)

    async def _on_closed(self, message: Msg) -> None:
        event = _decoded(message)
        if event is not None:
            self._detector.closed(event, asyncio.get_running_loop().time())

    async def _tick(self) -> None:
        assert self._registry is not None, "the registry is opened before the first tick"
        while True:
            pause = TICK
            if self.bus.connected:
                now = asyncio.get_running_loop().time()
                await self._registry.announce(self._detector.tick(now))
                pause = min(TICK, max(SOONEST, self._detector.due() - now))
            self._dirty.set()
            await asyncio.sleep(pause)

    async def _write(self, registry: Registry) -> None:
        """Writes whenever something may have changed; beats that arrive meanwhile are written together."""
        clock = asyncio.get_running_loop().time
        written = float("-inf")
        while True:
            await self._dirty.wait()
            if (soon := written + GATHER - clock()) > 0:
                await asyncio.sleep(soon)
            self._dirty.clear()
            detector = self._detector
            services, groups = detector.services(), detector.groups()
            self._count(services, groups)
            await registry.write(services, groups, detector.hosts(), clock())
            written = clock()

    def _count(self, services: list[ServiceRecord], groups: list[GroupRecord]) -> None:
        """Sets the gauges. Nearly all of its calls find everything as it was."""
        lost = self._detector.lost()
        instances = [(one.instance, one.name, one.state) for one in services]
        shown = [(one.group, one.model, one.state, one.weight, one.group in lost) for one in groups]
        self._clocks.keep(instance for instance, _, _ in instances)
        if instances != self._instances:
            self._instances = instances
            self._metrics.instances.clear()
            for _, name, state in instances:
                self._metrics.instances.labels(name, state).inc()
        if shown != self._groups:
            self._groups = shown
            self._count_groups()
        if (ahead := list(self._clocks.ahead())) != self._ahead:
            self._ahead = ahead
            self._metrics.clock_ahead.clear()
            for instance, seconds in ahead:
                self._metrics.clock_ahead.labels(instance).set(seconds)

    def _count_groups(self) -> None:
        metrics = self._metrics
        for gauge in (metrics.groups, metrics.weight, metrics.group_state, metrics.group_lost):
            gauge.clear()
        for group, model, state, weight, lost in self._groups:
            metrics.group_state.labels(group, model, state).set(1)
            if lost:
                metrics.group_lost.labels(group, model).set(1)
            metrics.groups.labels(state).inc()
            metrics.weight.labels(group).set(weight)


_decoder = msgspec.json.Decoder(ConnectionEvent)


def _decoded(message: Msg) -> ConnectionEvent | None:
    try:
        return _decoder.decode(message.data)
    except msgspec.DecodeError as error:
        log.warning("undecodable_message", subject=message.subject, error=str(error))
        return None

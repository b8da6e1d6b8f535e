"""Writes what the detector decides: the buckets `groups` and `services`, and the events.

Several monitors may write side by side: they decide alike, and saying a thing twice does no harm.
"""

import time
from collections.abc import Mapping

import msgspec
import structlog

from services.health_monitor.changes import Changes, Record
from services.health_monitor.metrics import HealthMetrics
from shared import subjects
from shared.bus import Bus
from shared.errors import RyzansteinError
from shared.messages import GroupEvent, GroupRecord, ServiceRecord
from shared.stores import Bucket

log = structlog.get_logger(__name__)


class Registry:
    """The two buckets that only health monitors write."""

    def __init__(
        self,
        bus: Bus,
        groups: Bucket[GroupRecord],
        services: Bucket[ServiceRecord],
        metrics: HealthMetrics,
        load_interval: float,
    ) -> None:
        self._bus = bus
        self._groups = groups
        self._services = services
        self._metrics = metrics
        self._group_changes: Changes[GroupRecord] = Changes(load_interval)
        self._service_changes: Changes[ServiceRecord] = Changes(load_interval)

    @classmethod
    async def open(cls, bus: Bus, metrics: HealthMetrics, load_interval: float) -> "Registry":
        groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
        services = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        return cls(bus, groups, services, metrics, load_interval)

    async def load(self, now: float) -> tuple[list[ServiceRecord], list[GroupRecord]]:
        """What stands in the buckets."""
        services, groups = await self._services.items(), await self._groups.items()
        self._service_changes.restore(services, now)
        self._group_changes.restore(groups, now)
        return list(services.values()), list(groups.values())

    async def announce(self, events: list[GroupEvent]) -> None:
        """Publishes group events; everybody reads them."""
        for event in (msgspec.structs.replace(event, at=time.time()) for event in events):
            log.info(
                "group_event", group=event.group, kind=event.kind, epoch=event.epoch, reason=event.reason
            )
            self._metrics.events.labels(event.kind).inc()
            try:
                await self._bus.publish(subjects.HEALTH_EVENTS, event)
            except RyzansteinError as error:
                log.warning("event_not_published", group=event.group, error=str(error))

    async def write(self, services: list[ServiceRecord], groups: list[GroupRecord], now: float) -> None:
        """Brings the buckets up to date. What fails is due again at the next call.

        The records are stamped with the time at which they were true, not with that of their writing: a
        reader can tell which of a record and an event is the newer one.
        """
        stamp = time.time()
        try:
            await self._write(self._groups, self._group_changes, {g.group: g for g in groups}, now, stamp)
            await self._write(
                self._services, self._service_changes, {s.instance: s for s in services}, now, stamp
            )
        except RyzansteinError as error:
            self._metrics.write_failures.inc()
            log.warning("record_not_written", error=str(error))

    async def _write(
        self,
        bucket: Bucket[Record],
        changes: Changes[Record],
        records: Mapping[str, Record],
        now: float,
        stamp: float,
    ) -> None:
        due = changes.due(records, now)
        for key, record in due.put.items():
            await bucket.put(key, msgspec.structs.replace(record, updated_at=stamp))
            changes.written(key, record, now)
            self._metrics.writes.inc()
        for key in due.delete:
            await bucket.delete(key)
            changes.deleted(key)

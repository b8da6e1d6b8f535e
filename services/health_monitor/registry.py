"""Writes what the detector decides: the buckets `groups`, `services` and `hosts`, and the events.

Several monitors write side by side, each over what it knows to stand there (compare-and-set): what is written
already is not written again, and a monitor that was stopped cannot bring back what it last believed.

    due ──▶ update(revision) ──▶ written ──▶ a ring that is up is told of
                 └─ somebody was first ──▶ read, merge into the detector ──▶ due again, if they differ

Bad news is told at once: it must not wait, and whoever was given up in error is heard again. That a ring is up is told
once the record which says so was written, at the revision that is known here: a monitor that was stopped would tell it
of a ring that is lost by now. One that is stopped between the two tells it late, with the time at which it was so.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar

import msgspec
import structlog

from services.health_monitor.metrics import HealthMetrics
from shared.errors import RyzansteinError
from shared.messages import GroupEvent, GroupRecord, HostRecord, ServiceRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

Record = TypeVar("Record", GroupRecord, ServiceRecord, HostRecord)

# Seconds after which an unchanged record is written again, so that readers see that it is not stale, and
# another monitor that the group is heard.
CONFIRM_INTERVAL = 2.0


class Due(msgspec.Struct, Generic[Record], frozen=True):
    """What to write and what to delete."""

    put: dict[str, Record]
    delete: list[str]


class DueRecords(Generic[Record]):
    """Which records are due, against the ones written last: a change of state and the end of a group's work at
    once, other load at most once per interval."""

    def __init__(self, load_interval: float) -> None:
        self._load_interval = load_interval
        self._written: dict[str, tuple[Record, float]] = {}

    def restore(self, records: Mapping[str, Record], now: float) -> None:
        """These records stand in the bucket already."""
        self._written = {key: (record, now) for key, record in records.items()}

    def due(self, records: Mapping[str, Record], now: float, anyway: Collection[str] = ()) -> Due[Record]:
        """What the bucket lacks at `now` (monotonic seconds), and the records `anyway`."""
        put = {key: record for key, record in records.items() if key in anyway or self._is_due(key, record, now)}
        return Due(put, [key for key in self._written if key not in records])

    def mark_written(self, key: str, record: Record, now: float) -> None:
        self._written[key] = (record, now)

    def deleted(self, key: str) -> None:
        self._written.pop(key, None)

    def _is_due(self, key: str, record: Record, now: float) -> bool:
        if key not in self._written:
            return True
        last, when = self._written[key]
        if _lasting(record) != _lasting(last) or (_works(last) and not _works(record)):
            return True
        interval = CONFIRM_INTERVAL if _content(record) == _content(last) else self._load_interval
        return now - when >= interval


def _works(record: GroupRecord | ServiceRecord | HostRecord) -> bool:
    """Whether it is a group with requests: its end of work must be known at once, another model may wait for it."""
    return isinstance(record, GroupRecord) and record.load.running + record.load.waiting > 0


def _lasting(record: GroupRecord | ServiceRecord | HostRecord) -> object:
    """What must be known at once."""
    if isinstance(record, HostRecord):
        host = record.host
        jobs = [(kind, told.places, [(one.job, one.attempt) for one in told.jobs]) for kind, told in host.jobs.items()]
        models = [(one.model, one.state) for one in host.models]
        return record.state, host.memory, host.used, jobs, models
    if isinstance(record, GroupRecord):
        pids = [rank.pid for rank in record.ranks]
        return record.model, record.state, record.epoch, record.instance, record.weight < 1, pids
    return record.name, record.pid, record.state, record.address


def _content(record: Record) -> Record:
    return msgspec.structs.replace(record, updated_at=0.0, heard_at=0.0)


log = structlog.get_logger(__name__)


class SharedRecords(Generic[Record]):
    """One bucket that several monitors write."""

    def __init__(
        self,
        bucket: Bucket[Record],
        load_interval: float,
        metrics: HealthMetrics,
        wrote: Callable[[Record], object],
        deleted: Callable[[str], object],
    ) -> None:
        """`wrote` and `deleted` are told of what other monitors do to the bucket."""
        self._bucket: Bucket[Record] = bucket
        self._changes: DueRecords[Record] = DueRecords(load_interval)
        self._metrics = metrics
        self._wrote: Callable[[Record], object] = wrote
        self._deleted = deleted
        self._revisions: dict[str, int] = {}

    async def load(self, now: float) -> list[Record]:
        """What stands in the bucket."""
        records = await self._bucket.items()
        self._changes.restore(records, now)
        return list(records.values())

    async def follow(self, clock: Callable[[], float]) -> None:
        """Learns what others write, until it is cancelled."""
        await self._bucket.follow_revisions(lambda key, record, revision: self._learn(key, record, revision, clock()))

    async def write(
        self,
        records: Mapping[str, Record],
        now: float,
        stamp: float,
        *,
        anyway: Collection[str] = (),
        put: Callable[[Record], Awaitable[object]] | None = None,
    ) -> None:
        """Brings the bucket up to date. `anyway`: records that are written though they may stand there; `put` is told
        of each that was written. Raises `BrokerUnavailable`: the rest is due again at the next call."""
        due = self._changes.due(records, now, anyway)
        for key, record in due.put.items():
            written = await self._put(key, msgspec.structs.replace(record, updated_at=stamp), now)
            if written and put is not None:
                await put(record)
        for key in due.delete:
            if await self._bucket.delete(key, self._revisions.get(key)):
                self._revisions.pop(key, None)
                self._changes.deleted(key)
            else:
                await self._read(key, now)

    async def _put(self, key: str, record: Record, now: float) -> bool:
        """False: another monitor was first."""
        known = self._revisions.get(key)
        if known is None:
            revision = await self._bucket.create(key, record)
        else:
            revision = await self._bucket.update(key, record, known)
        if revision is None:
            await self._read(key, now)
            return False
        self._revisions[key] = max(revision, self._revisions.get(key, 0))
        self._changes.mark_written(key, record, now)
        self._metrics.writes.inc()
        return True

    async def _read(self, key: str, now: float) -> None:
        entry = await self._bucket.get(key)
        if entry is None:
            self._learn(key, None, 0, now)
        else:
            self._learn(key, entry.value, entry.revision, now)

    def _learn(self, key: str, record: Record | None, revision: int, now: float) -> None:
        if record is None:
            self._revisions.pop(key, None)
            self._changes.deleted(key)
            self._deleted(key)
        elif revision > self._revisions.get(key, 0):
            self._revisions[key] = revision
            self._changes.mark_written(key, record, now)
            self._wrote(record)


def _is_up(record: GroupRecord | None, event: GroupEvent) -> bool:
    """Whether `record` says the same as an event that the ring is up."""
    return record is not None and record.epoch == event.epoch and record.state in ("ready", "busy")


class Registry:
    """The buckets that only health monitors write."""

    def __init__(
        self,
        bus: Bus,
        metrics: HealthMetrics,
        groups: SharedRecords[GroupRecord],
        services: SharedRecords[ServiceRecord],
        hosts: SharedRecords[HostRecord],
    ) -> None:
        self._bus = bus
        self._metrics = metrics
        self.groups = groups
        self.services = services
        self.hosts = hosts
        self._up: dict[str, GroupEvent] = {}  # by group: that it is up, while its record is not written yet

    async def announce(self, events: list[GroupEvent]) -> None:
        """Publishes group events, which everybody reads: at once, but for those of rings that are up."""
        for event in (msgspec.structs.replace(event, at=time.time()) for event in events):
            if event.kind == "up":
                self._up[event.group] = event
            else:
                self._up.pop(event.group, None)
                await self._publish(event)

    async def _tell_up(self, record: GroupRecord, up: Mapping[str, GroupEvent]) -> None:
        """`record` was written; `up`: what was to be told when it was taken."""
        event = up.get(record.group)
        if event is not None and self._up.get(record.group) is event:
            del self._up[record.group]
            await self._publish(event)

    async def _publish(self, event: GroupEvent) -> None:
        log.info(
            "group_event",
            group=event.group,
            kind=event.kind,
            epoch=event.epoch,
            reason=event.reason,
            cause=event.death.cause if event.death is not None else "",
        )
        self._metrics.events.labels(event.kind).inc()
        try:
            await self._bus.publish(subjects.HEALTH_EVENTS, event)
        except RyzansteinError as error:
            log.warning("event_publish_failed", group=event.group, error=str(error))

    async def write(
        self, services: list[ServiceRecord], groups: list[GroupRecord], hosts: list[HostRecord], now: float
    ) -> None:
        """Brings the buckets up to date. What fails is due again at the next call.

        The records are stamped with the time at which they were true, not with that of their writing: a
        reader can tell which of a record and an event is the newer one.
        """
        stamp = time.time()
        try:
            known = {group.group: group for group in groups}
            up = {name: event for name, event in self._up.items() if _is_up(known.get(name), event)}
            self._up = dict(up)
            await self.groups.write(known, now, stamp, anyway=up, put=lambda record: self._tell_up(record, up))
            await self.services.write({one.instance: one for one in services}, now, stamp)
            await self.hosts.write({host.instance: host for host in hosts}, now, stamp)
        except RyzansteinError as error:
            self._metrics.write_failures.inc()
            log.warning("record_write_failed", error=str(error))

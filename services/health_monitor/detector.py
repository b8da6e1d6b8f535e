"""Decides from heartbeats and time who is alive, busy, hung or gone. No clock: time comes in.

    starting ──▶ ready ⇄ busy ──▶ draining          of a group, while its instance is heard
                   └─▶ hung ──▶ ready                counters stand still; they move again
    any ──▶ gone                                      not heard, cut off, or said so itself

Events follow the states: `up` when a ring becomes ready or busy, `draining` when it leaves, `down`
when a ring that was up is hung, gone, starting anew, or replaced by one of a later epoch.

Several monitors decide side by side. What another has written counts by its evidence, the time of the
heartbeat that it knows it from: the later evidence wins, and of equal evidence the worse state.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from services.health_monitor.speed import Speeds
from shared.messages import (
    GroupBeat,
    GroupEvent,
    GroupRecord,
    GroupStatus,
    Heartbeat,
    HostBeat,
    HostRecord,
    RingDeath,
    ServiceRecord,
)
from shared.nats import subjects
from shared.process import ProgressWatch

WINDOW = 8  # heartbeats of an instance that are compared
# Seconds by which a clock may differ before that is told: deadlines, limits per minute and reports of service levels
# compare clocks; nothing else does.
LARGE = 2.0

log = structlog.get_logger(__name__)


class Clocks:
    """Whose clocks differ from this monitor's, as heartbeats tell.

        sent_at, by the sender's clock ── on its way, perhaps delayed ──▶ now, by ours

    A delay makes a clock look slower than it is and never faster: of the last WINDOW heartbeats the one that was
    delayed least counts, so one that waited in a cut link says nothing of a clock.
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def observe(self, instance: str, sent_at: float, now: float) -> None:
        """A heartbeat has come. `sent_at` (unix seconds) is 0 where its sender is of an older version."""
        if not sent_at:
            return
        seen = self._seen.setdefault(instance, deque(maxlen=WINDOW))
        seen.append(sent_at - now)
        if len(seen) == WINDOW:
            self._tell(instance, max(seen))

    def keep(self, instances: Iterable[str]) -> None:
        """Forgets all others."""
        for gone in self._seen.keys() - set(instances):
            del self._seen[gone]
            self._told.discard(gone)

    def ahead(self) -> Iterator[tuple[str, float]]:
        """(instance, seconds), those behind with less than 0; none of whom too little was heard."""
        return ((name, max(seen)) for name, seen in self._seen.items() if len(seen) == WINDOW)

    def _tell(self, instance: str, ahead: float) -> None:
        """Once when it begins, and once when it is over."""
        if abs(ahead) > LARGE and instance not in self._told:
            self._told.add(instance)
            log.warning("clock_skew_detected", instance=instance, seconds_ahead=round(ahead, 3))
        elif abs(ahead) <= LARGE / 2 and instance in self._told:
            self._told.remove(instance)
            log.info("clock_skew_resolved", instance=instance, seconds_ahead=round(ahead, 3))


GRACE = 0.25  # seconds in which a client that lives is back: nats-py waits 0.1 s before it connects again
# How nats-server calls what the operating system does for a process that is gone (`ClosedState`).
_BY_THE_PROCESS = ("Client Closed", "Read Error", "Write Error")


class ConnectedClient(msgspec.Struct, frozen=True):
    """Who is connected, as nats-server tells it."""

    start: datetime
    name: str = ""


class ConnectionEvent(msgspec.Struct, frozen=True):
    """A connection has opened or closed: $SYS.ACCOUNT.*.CONNECT and .DISCONNECT (JSON)."""

    client: ConnectedClient
    reason: str = ""


class Presence:
    """Whose connection to the broker was cut: a process that is killed is known at once by that.

    The broker tells of connections that open and close, where its configuration lets us hear of them
    (docs/operations.md); where it does not, silence says the same some seconds later.

        closed by the process ──GRACE──▶ cut          it has not come back
             └── opened again, or heard ──▶ nothing    a connection that was renewed
        closed by the broker (a slow consumer, its own end) ──▶ nothing: the process lives

    Times are seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._opened: dict[str, datetime] = {}
        self._closed: dict[str, float] = {}

    def opened(self, event: ConnectionEvent) -> None:
        self._closed.pop(event.client.name, None)
        self._opened[event.client.name] = event.client.start

    def closed(self, event: ConnectionEvent, now: float) -> None:
        name = event.client.name
        newest = self._opened.get(name)
        if newest is not None and event.client.start < newest:
            return  # its successor is here already
        self._opened.pop(name, None)
        if event.reason in _BY_THE_PROCESS:
            self._closed[name] = now

    def on_heard(self, name: str) -> None:
        """A message of that connection has come."""
        self._closed.pop(name, None)

    def cut(self, now: float) -> list[str]:
        """Connections that are gone for good, each told once."""
        due = [name for name, closed in self._closed.items() if now - closed >= GRACE]
        for name in due:
            del self._closed[name]
        return due

    def due(self) -> float:
        """When `cut` tells of the first of them; infinite: never."""
        return min(self._closed.values(), default=math.inf) + GRACE

    def restart_timeouts(self, now: float) -> None:
        """We have not been listening: who was about to be given up may have come back."""
        self._closed = dict.fromkeys(self._closed, now)


STALL = 1.0  # seconds between two ticks from which on the monitor itself was not listening, and blames nobody

SAME = 0.5  # seconds by which two monitors may have heard the same heartbeat at different times

# Seconds after which a leader whose connection has closed knows it, and its executor's heartbeats say so: one that
# says it is connected then has connected anew, while this monitor was not connected itself and did not hear of it.
NOTICE = 2.0

_SERVING = ("ready", "busy")
_CUT_OFF = "its leader has lost its connection to NATS"


Record = TypeVar("Record", GroupRecord, ServiceRecord, HostRecord)


@dataclass(slots=True)
class _Instance:
    record: ServiceRecord
    heard: float
    host: HostBeat | None = None  # of an executor: what was last said of it as a host


@dataclass(slots=True)
class _Group:
    record: GroupRecord
    # When its silence began to count: later, perhaps, than the last heartbeat that any monitor has heard.
    heard: float
    progress: ProgressWatch
    announced: Literal["", "up", "draining"] = ""  # the last event about this ring, unless it was a loss
    cut_off: float | None = None  # when its leader's connection to the broker closed; None: it stands
    lost: bool = False  # whether it is gone without having left: it was in service, and nobody had it drained
    death: RingDeath | None = None  # what its executor has last said of this ring's end

    def become(self, state: GroupStatus, **changes: Any) -> None:
        """`changes`: of other fields of the record."""
        if state != "gone":
            self.lost = False
        elif self.record.state != "gone":
            self.lost = self.record.state in (*_SERVING, "hung")
        self.record = replace(self.record, state=state, **changes)


class Detector:
    """The failure detector. Times are monotonic seconds; records come without `updated_at`."""

    def __init__(self, *, hung_after: float, gone_after: float, forget_after: float) -> None:
        self._hung_after = hung_after
        self._gone_after = gone_after
        self._forget_after = forget_after
        self._instances: dict[str, _Instance] = {}
        self._groups: dict[str, _Group] = {}
        self._presence = Presence()
        self._speeds = Speeds()
        self._ticked: float | None = None

    def services(self) -> list[ServiceRecord]:
        return [entry.record for entry in self._instances.values()]

    def groups(self) -> list[GroupRecord]:
        return [entry.record for entry in self._groups.values()]

    def hosts(self) -> list[HostRecord]:
        return [
            HostRecord(entry.record.instance, entry.host, entry.record.state, heard_at=entry.record.heard_at)
            for entry in self._instances.values()
            if entry.host is not None
        ]

    def lost(self) -> set[str]:
        """Groups that are gone without having left, while they are listed."""
        return {name for name, entry in self._groups.items() if entry.lost}

    def restore(
        self,
        services: Iterable[ServiceRecord],
        groups: Iterable[GroupRecord],
        now: float,
        hosts: Iterable[HostRecord] = (),
    ) -> None:
        """Begins with what an earlier monitor wrote; everybody has `gone_after` to be heard of."""
        for service in services:
            self._instances[service.instance] = _Instance(_undated(service), now)
        for host in hosts:
            if (entry := self._instances.get(host.instance)) is not None:
                entry.host = host.host
        for record in groups:
            self._groups[record.group] = self._entry_of(record, now)

    def restart_timeouts(self, now: float) -> None:
        """The monitor has not been listening: everybody who was alive has `gone_after` once more."""
        for instance in self._instances.values():
            if instance.record.state != "gone":
                instance.heard = now
        for group in self._groups.values():
            if group.record.state != "gone":
                group.heard = now
                group.cut_off = None
        self._presence.restart_timeouts(now)

    # --- other monitors --------------------------------------------------------------------------

    def merge(self, record: GroupRecord, now: float, at: float) -> None:
        """Takes in what another monitor has written. `at`: unix seconds, as `now`."""
        entry = self._groups.get(record.group)
        if entry is None or record.epoch > entry.record.epoch:
            entry = self._groups[record.group] = self._entry_of(record, now)
            entry.heard = min(now, now - at + record.heard_at) if record.heard_at else now
            return
        ahead = record.heard_at - entry.record.heard_at
        if record.epoch < entry.record.epoch or ahead < -SAME:
            return
        if ahead > SAME:
            entry.heard = max(entry.heard, min(now, now - at + record.heard_at))
            self._take_over(entry, record, heard_at=record.heard_at)
        elif _badness(record.state) > _badness(entry.record.state):
            self._take_over(entry, record)

    def merge_service(self, record: ServiceRecord, now: float, at: float) -> None:
        entry = self._instances.get(record.instance)
        ahead = record.heard_at - (entry.record.heard_at if entry is not None else 0.0)
        if entry is None or ahead > SAME:
            heard = min(now, now - at + record.heard_at) if record.heard_at else now
            host = entry.host if entry is not None else None
            self._instances[record.instance] = _Instance(_undated(record), heard, host)
        elif ahead >= -SAME and record.state == "gone":
            entry.record = replace(entry.record, state="gone")

    def merge_host(self, record: HostRecord) -> None:
        """What another monitor knows of a host, where it was heard later than here. Whether it is there is merged
        with its service."""
        entry = self._instances.get(record.instance)
        if entry is not None and (entry.host is None or record.heard_at - entry.record.heard_at > SAME):
            entry.host = record.host

    def drop(self, group: str = "", instance: str = "") -> None:
        """Another monitor has taken it off the list; what we hear ourselves stays on it."""
        entry = self._groups.get(group)
        if entry is not None and entry.record.state == "gone":
            del self._groups[group]
        service = self._instances.get(instance)
        if service is not None and service.record.state == "gone":
            del self._instances[instance]

    @staticmethod
    def _take_over(entry: _Group, record: GroupRecord, **changes: Any) -> None:
        """Its writer has told the world already."""
        entry.become(record.state, message=record.message, **changes)
        entry.announced = _announced(record.state)

    def _entry_of(self, record: GroupRecord, now: float) -> _Group:
        progress = ProgressWatch(self._hung_after)
        return _Group(_undated(record), now, progress, announced=_announced(record.state))

    # --- connections -----------------------------------------------------------------------------

    def opened(self, event: ConnectionEvent) -> None:
        """A process has connected to the broker."""
        self._presence.opened(event)
        for group in self._groups.values():
            if _leader_of(group) == event.client.name:
                group.cut_off = None

    def closed(self, event: ConnectionEvent, now: float) -> None:
        """A connection to the broker has closed; `tick` says what comes of it."""
        self._presence.closed(event, now)

    def _cut(self, name: str, now: float) -> list[GroupEvent]:
        """The process that had the connection `name` is gone, or cannot reach the broker."""
        events: list[GroupEvent] = []
        for instance in self._instances.values():
            record = instance.record
            if name == subjects.connection(record.name, record.instance) and record.state != "gone":
                instance.record = replace(record, state="gone")
                events += self._end_groups(record.instance, "its executor has lost its connection to NATS")
        for group in self._groups.values():
            if name == _leader_of(group) and group.record.state != "gone":
                group.cut_off = now
                # Its executor, where that is there, starts another ring: no replica of the model is missing.
                executor = self._instances.get(group.record.instance)
                alive = executor is not None and executor.record.state != "gone"
                events += self._set_state(group, "hung" if alive else "gone", message=_CUT_OFF)
        return events

    # --- heartbeats ------------------------------------------------------------------------------

    def observe(self, beat: Heartbeat, now: float, at: float = 0.0) -> list[GroupEvent]:
        """Takes in one heartbeat, at `now` (`at` in unix seconds); returns what has happened to groups."""
        self._notice_stall(now)
        self._presence.on_heard(subjects.connection(beat.service, beat.instance))
        record = ServiceRecord(beat.service, beat.instance, beat.pid, beat.state, beat.address)
        record = replace(record, heard_at=at, pid_namespace=beat.pid_namespace, version=beat.version)
        self._instances[beat.instance] = _Instance(record, now, beat.host)
        if beat.state == "gone":
            return self._end_groups(beat.instance, "its executor has stopped")
        said = beat.groups or ([beat.group] if beat.group is not None else [])
        left = {group.group for group in said}
        events = self._end_groups(beat.instance, "it was unloaded", left) if beat.host else []
        for group in said:
            events += self._observe_group(beat, group, now, at)
        return events

    def _observe_group(self, beat: Heartbeat, said: GroupBeat, now: float, at: float) -> list[GroupEvent]:
        entry = self._groups.get(said.group)
        if entry is not None and said.epoch < entry.record.epoch and not _has_lost_its_ring(beat, said, entry):
            return []  # from a life that is over
        events: list[GroupEvent] = []
        if entry is None or said.epoch > entry.record.epoch:
            if entry is not None:
                _note_death(entry, said)
                events += _down(entry, f"epoch {said.epoch} replaced it")
            record = GroupRecord(said.group, said.model, "starting", said.epoch, said.ranks, said.load)
            entry = self._groups[said.group] = _Group(record, now, ProgressWatch(self._hung_after))
        entry.heard = now
        if said.connected and entry.cut_off is not None and now - entry.cut_off >= NOTICE:
            entry.cut_off = None
        _note_death(entry, said)
        hung = _hung_ranks(entry.progress, said, now)
        state, message = self._judge(beat, said, entry, hung)
        return events + self._set_state(
            entry,
            state,
            ranks=said.ranks,
            load=said.load,
            instance=beat.instance,
            loaded=said.loaded,
            message=message or said.message,
            weight=self._speeds.observe(said.group, said.model, said.epoch, said.work, now),
            heard_at=at,
            kv_bytes=said.kv_bytes,
            kernels=said.kernels,
            memory=said.memory,
            adapters=said.adapters,
            streamed=said.streamed,
            traits=said.traits,
        )

    def _judge(self, beat: Heartbeat, said: GroupBeat, entry: _Group, hung: list[int]) -> tuple[GroupStatus, str]:
        """The state that a beat shows, and what there is to say of it."""
        if said.state == "starting":
            return "starting", ""
        if entry.cut_off is not None or not said.connected:
            return "hung", _CUT_OFF
        if hung:
            ranks = ", ".join(map(str, hung))
            return "hung", f"no progress for {self._hung_after:g} s on rank {ranks}"
        if "draining" in (said.state, beat.state):
            return "draining", ""
        full = said.load.running > 0 and said.load.total_blocks > 0 and said.load.free_blocks == 0
        return ("busy" if said.load.waiting > 0 or full else "ready"), ""

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[GroupEvent]:
        """Looks who has not been heard of; to be called several times per second."""
        self._notice_stall(now)
        self._ticked = now
        events: list[GroupEvent] = []
        for name in self._presence.cut(now):
            events += self._cut(name, now)
        for instance in self._instances.values():
            if instance.record.state != "gone" and now - instance.heard >= self._gone_after:
                instance.record = replace(instance.record, state="gone")
        for group in self._groups.values():
            if group.record.state != "gone" and now - group.heard >= self._gone_after:
                silent = f"no heartbeat for {self._gone_after:g} s"
                events += self._set_state(group, "gone", message=silent)
        self._forget(now)
        return events

    def due(self) -> float:
        """When `tick` has something to say unless somebody is heard before; infinite: never."""
        heard = [one.heard for one in self._instances.values() if one.record.state != "gone"]
        heard += [one.heard for one in self._groups.values() if one.record.state != "gone"]
        return min(min(heard, default=math.inf) + self._gone_after, self._presence.due())

    def _notice_stall(self, now: float) -> None:
        """Whoever was not listening, since it was stopped or had no processor, blames nobody: what comes in
        now is old, and stands closer together than it was sent."""
        if self._ticked is not None and now - self._ticked > STALL:
            self._ticked = now
            self.restart_timeouts(now)
            for group in self._groups.values():
                group.progress = ProgressWatch(self._hung_after)

    def _end_groups(self, instance: str, reason: str, left: set[str] | None = None) -> list[GroupEvent]:
        """An executor's groups are gone; with `left`, all but these: it goes on, and has unloaded the others."""
        events: list[GroupEvent] = []
        for name, group in self._groups.items():
            if group.record.instance == instance and name not in (left or ()) and group.record.state != "gone":
                events += self._set_state(group, "gone", message=reason)
                group.lost = group.lost and left is None
        return events

    def _forget(self, now: float) -> None:
        """Drops what has been gone for long."""
        self._instances = {name: entry for name, entry in self._instances.items() if not self._forgotten(entry, now)}
        self._groups = {name: entry for name, entry in self._groups.items() if not self._forgotten(entry, now)}
        self._speeds.keep(self._groups)

    def _forgotten(self, entry: _Instance | _Group, now: float) -> bool:
        return entry.record.state == "gone" and now - entry.heard >= self._gone_after + self._forget_after

    # --- states and events -----------------------------------------------------------------------

    def _set_state(self, entry: _Group, state: GroupStatus, **changes: Any) -> list[GroupEvent]:
        entry.become(state, **changes)
        if state in _SERVING:
            return _announce(entry, "up")
        if state == "draining":
            return _announce(entry, "draining") if entry.announced else []
        return _down(entry, entry.record.message or state)


def _has_lost_its_ring(beat: Heartbeat, said: GroupBeat, entry: _Group) -> bool:
    """Whether a beat of an older epoch means that there is no ring at the moment, and not that an executor
    is still about which another one has replaced."""
    ringless = said.state == "starting" and not said.ranks
    return ringless and (beat.instance == entry.record.instance or entry.record.state == "gone")


def _hung_ranks(progress: ProgressWatch, said: GroupBeat, now: float) -> list[int]:
    """Ranks that stand still. Without work for the group, nothing need move."""
    work = said.load.running + said.load.waiting > 0
    return [
        beat.rank
        for beat in said.ranks
        if progress.stands_still(beat.rank, (beat.pid, beat.step, beat.progress), beat.in_flight and work, now)
    ]


def _undated(record: Record) -> Record:
    return replace(record, updated_at=0.0)


def _badness(state: GroupStatus) -> int:
    return {"hung": 1, "gone": 2}.get(state, 0)


def _note_death(entry: _Group, said: GroupBeat) -> None:
    entry.death = said.death if said.death is not None and said.death.epoch == entry.record.epoch else None


def _leader_of(group: _Group) -> str:
    """Name of the connection of the group's leader."""
    return subjects.leader_connection(group.record.instance, group.record.group)


def _announced(state: GroupStatus) -> Literal["", "up", "draining"]:
    """What was last said of a ring in `state`."""
    if state in _SERVING:
        return "up"
    return "draining" if state == "draining" else ""


def _announce(entry: _Group, kind: Literal["up", "draining"]) -> list[GroupEvent]:
    if entry.announced == kind:
        return []
    entry.announced = kind
    return [GroupEvent(entry.record.group, entry.record.model, entry.record.epoch, kind)]


def _down(entry: _Group, reason: str) -> list[GroupEvent]:
    """The loss of a ring, told once, and only of a ring that was up."""
    if not entry.announced:
        return []
    entry.announced = ""
    record = entry.record
    return [GroupEvent(record.group, record.model, record.epoch, "down", reason, death=entry.death)]

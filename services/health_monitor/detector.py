"""Decides from heartbeats and time who is alive, busy, hung or gone. No clock: time comes in.

    starting ──▶ ready ⇄ busy ──▶ draining          of a group, while its instance is heard
                   └─▶ hung ──▶ ready                counters stand still; they move again
    any ──▶ gone                                      not heard, or said so itself

Events follow the states: `up` when a ring becomes ready or busy, `draining` when it leaves, `down`
when a ring that was up is hung, gone, starting anew, or replaced by one of a later epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from shared.messages import (
    GroupBeat,
    GroupEvent,
    GroupLoad,
    GroupRecord,
    GroupStatus,
    Heartbeat,
    RankBeat,
    ServiceName,
    ServiceRecord,
    ServiceStatus,
)
from shared.progress import ProgressWatch

STALL = 1.0
"""Seconds between two ticks from which on the monitor itself was not listening, and blames nobody."""

_SERVING = ("ready", "busy")


@dataclass(slots=True)
class _Instance:
    name: ServiceName
    instance: str
    pid: int
    state: ServiceStatus
    address: str
    heard: float

    def record(self) -> ServiceRecord:
        return ServiceRecord(self.name, self.instance, self.pid, self.state, self.address)


@dataclass(slots=True)
class _Group:
    group: str
    model: str
    epoch: int
    instance: str
    heard: float
    progress: ProgressWatch
    state: GroupStatus = "starting"
    load: GroupLoad = field(default_factory=GroupLoad)
    ranks: list[RankBeat] = field(default_factory=list)
    loaded: float = 0.0
    message: str = ""
    announced: Literal["", "up", "draining"] = ""
    """The last event about this ring, unless it was a loss."""

    def record(self) -> GroupRecord:
        return GroupRecord(
            group=self.group,
            model=self.model,
            state=self.state,
            epoch=self.epoch,
            ranks=self.ranks,
            load=self.load,
            instance=self.instance,
            loaded=self.loaded,
            message=self.message,
        )


class Detector:
    """The failure detector. Times are monotonic seconds; records come without `updated_at`."""

    def __init__(self, *, hung_after: float, gone_after: float, forget_after: float) -> None:
        self._hung_after = hung_after
        self._gone_after = gone_after
        self._forget_after = forget_after
        self._instances: dict[str, _Instance] = {}
        self._groups: dict[str, _Group] = {}
        self._ticked: float | None = None

    def services(self) -> list[ServiceRecord]:
        return [entry.record() for entry in self._instances.values()]

    def groups(self) -> list[GroupRecord]:
        return [entry.record() for entry in self._groups.values()]

    def restore(self, services: Iterable[ServiceRecord], groups: Iterable[GroupRecord], now: float) -> None:
        """Begins with what an earlier monitor wrote; everybody has `gone_after` to be heard of."""
        for service in services:
            self._instances[service.instance] = _Instance(
                service.name, service.instance, service.pid, service.state, service.address, now
            )
        for record in groups:
            self._groups[record.group] = _Group(
                group=record.group,
                model=record.model,
                epoch=record.epoch,
                instance=record.instance,
                heard=now,
                progress=ProgressWatch(self._hung_after),
                state=record.state,
                load=record.load,
                ranks=record.ranks,
                loaded=record.loaded,
                message=record.message,
                announced=_announced(record.state),
            )

    def pardon(self, now: float) -> None:
        """The monitor has not been listening: everybody who was alive has `gone_after` once more."""
        for instance in self._instances.values():
            if instance.state != "gone":
                instance.heard = now
        for group in self._groups.values():
            if group.state != "gone":
                group.heard = now

    # --- heartbeats ------------------------------------------------------------------------------

    def observe(self, beat: Heartbeat, now: float) -> list[GroupEvent]:
        """Takes in one heartbeat; returns what has happened to groups."""
        self._instances[beat.instance] = _Instance(
            beat.service, beat.instance, beat.pid, beat.state, beat.address, now
        )
        if beat.state == "gone":
            return self._lose_groups(beat.instance)
        if beat.group is None:
            return []
        return self._observe_group(beat, beat.group, now)

    def _observe_group(self, beat: Heartbeat, said: GroupBeat, now: float) -> list[GroupEvent]:
        entry = self._groups.get(said.group)
        if entry is not None and said.epoch < entry.epoch and not _has_lost_its_ring(beat, said, entry):
            return []  # from a life that is over
        events: list[GroupEvent] = []
        if entry is None or said.epoch > entry.epoch:
            if entry is not None:
                events += _down(entry, f"epoch {said.epoch} took its place")
            progress = ProgressWatch(self._hung_after)
            entry = _Group(said.group, said.model, said.epoch, beat.instance, now, progress)
            self._groups[said.group] = entry
        entry.heard = now
        entry.instance = beat.instance
        entry.load, entry.ranks = said.load, said.ranks
        entry.loaded, entry.message = said.loaded, said.message
        hung = _hung_ranks(entry.progress, said, now)
        return events + self._set_state(entry, self._judge(beat, said, entry, hung))

    def _judge(self, beat: Heartbeat, said: GroupBeat, entry: _Group, hung: list[int]) -> GroupStatus:
        """The state that a beat shows."""
        if said.state == "starting":
            return "starting"
        if hung:
            ranks = ", ".join(map(str, hung))
            entry.message = f"no progress for {self._hung_after:g} s on rank {ranks}"
            return "hung"
        if "draining" in (said.state, beat.state):
            return "draining"
        full = said.load.running > 0 and said.load.total_blocks > 0 and said.load.free_blocks == 0
        return "busy" if said.load.waiting > 0 or full else "ready"

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[GroupEvent]:
        """Looks who has not been heard of; to be called several times per second."""
        if self._ticked is not None and now - self._ticked > STALL:
            self.pardon(now)
        self._ticked = now
        events: list[GroupEvent] = []
        for instance in self._instances.values():
            if instance.state != "gone" and now - instance.heard >= self._gone_after:
                instance.state = "gone"
        for group in self._groups.values():
            if group.state != "gone" and now - group.heard >= self._gone_after:
                group.message = f"no heartbeat for {self._gone_after:g} s"
                events += self._set_state(group, "gone")
        self._forget(now)
        return events

    def _lose_groups(self, instance: str) -> list[GroupEvent]:
        """An instance has said that it is gone: so are its groups."""
        events: list[GroupEvent] = []
        for group in self._groups.values():
            if group.instance == instance and group.state != "gone":
                group.message = "its executor has stopped"
                events += self._set_state(group, "gone")
        return events

    def _forget(self, now: float) -> None:
        """Drops what has been gone for long."""
        self._instances = {
            name: entry for name, entry in self._instances.items() if not self._forgotten(entry, now)
        }
        self._groups = {
            name: entry for name, entry in self._groups.items() if not self._forgotten(entry, now)
        }

    def _forgotten(self, entry: _Instance | _Group, now: float) -> bool:
        return entry.state == "gone" and now - entry.heard >= self._gone_after + self._forget_after

    # --- states and events -----------------------------------------------------------------------

    def _set_state(self, entry: _Group, state: GroupStatus) -> list[GroupEvent]:
        entry.state = state
        if state in _SERVING:
            return _announce(entry, "up")
        if state == "draining":
            return _announce(entry, "draining") if entry.announced else []
        return _down(entry, entry.message or state)


def _has_lost_its_ring(beat: Heartbeat, said: GroupBeat, entry: _Group) -> bool:
    """Whether a beat of an older epoch means that there is no ring at the moment, and not that an executor
    is still about which another one has replaced."""
    ringless = said.state == "starting" and not said.ranks
    return ringless and (beat.instance == entry.instance or entry.state == "gone")


def _hung_ranks(progress: ProgressWatch, said: GroupBeat, now: float) -> list[int]:
    """Ranks that stand still. Without work for the group, nothing need move."""
    work = said.load.running + said.load.waiting > 0
    return [
        beat.rank
        for beat in said.ranks
        if progress.stands_still(
            beat.rank, (beat.pid, beat.step, beat.progress), beat.in_flight and work, now
        )
    ]


def _announced(state: GroupStatus) -> Literal["", "up", "draining"]:
    """What was last said of a ring in `state`."""
    if state in _SERVING:
        return "up"
    return "draining" if state == "draining" else ""


def _announce(entry: _Group, kind: Literal["up", "draining"]) -> list[GroupEvent]:
    if entry.announced == kind:
        return []
    entry.announced = kind
    return [GroupEvent(entry.group, entry.model, entry.epoch, kind)]


def _down(entry: _Group, reason: str) -> list[GroupEvent]:
    """The loss of a ring, told once, and only of a ring that was up."""
    if not entry.announced:
        return []
    entry.announced = ""
    return [GroupEvent(entry.group, entry.model, entry.epoch, "down", reason)]

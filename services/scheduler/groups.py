"""What this scheduler knows of the groups: their records, their replies, and what it has sent them.

A load report is a snapshot; what was sent since is added until the reply to it brings a newer one:

    expected load = last report + requests sent and not answered yet

A group is open, and a candidate for placement, while it is up, its breaker allows, and it has room:

    |◀──────────── slots ────────────▶|◀─ backlog ─▶|
    | running | waiting | sent        :             |   more waits here, in the scheduler's fair order,
                                                        and not in the ring's
"""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Literal

from services.scheduler.ttft_estimator import SCARCE_SHARE, TtftEstimator, Usual
from shared.messages import GroupEvent, GroupLoad, GroupRecord, GroupStatus, GroupTraits, Lane

State = Literal["closed", "half_open", "open"]
STATES: tuple[State, ...] = ("closed", "half_open", "open")

# Seconds for which a group is left alone that has refused, doubled with each time in a row.
FIRST_REFUSAL, LONGEST_REFUSAL = 0.01, 1.0
# After a time-out the open time doubles so often at most: a group that is back shall not wait long.
TIMEOUT_DOUBLINGS = 3


@dataclass(slots=True)
class CircuitBreaker:
    """One group's, as one scheduler sees it: who has failed is left alone for a while, and is then tried with one
    request. Times are monotonic seconds.

                 failure, trip                     open time is over
        closed ────────────────▶ open ────────────────────────────▶ half-open ──┐ one probe may go
           ▲                      ▲ ▲        failure of the probe,      │       │ at a time; `cancel_probe`
           │                      │ └─────── twice the open time ───────┘ ◀─────┘ when it was not sent
           └──────────────────────┴────────── success ──────────────────┘

    Failures are refusals (short open times: the group lives and is full), time-outs (longer ones) and what the
    health monitor says (open until it says otherwise). After M. Nygard, Release It! (2007).
    """

    timeout_pause: float = 1.0  # seconds for which the group is left alone after the first time-out
    state: State = "closed"
    # While it is open: when it will be half-open; infinite when only the health monitor can say.
    open_until: float = 0.0
    _pause: float = 0.0  # the last open time; 0 after a success
    _probing: bool = False

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half_open" and not self._probing)

    def sent(self) -> None:
        """A request goes to the group: in half-open it is the probe."""
        self._probing = self.state == "half_open"

    def cancel_probe(self) -> None:
        """Nothing that was sent is on its way any more: another probe may go."""
        self._probing = False

    def succeeded(self) -> None:
        """The group has taken what it was sent."""
        if self.open_until != math.inf or self.state != "open":
            self._pause, self._probing = 0.0, False
            self.state, self.open_until = "closed", 0.0

    def refused(self, now: float) -> None:
        """The group has not taken something, and may later."""
        self._fail(now, FIRST_REFUSAL, LONGEST_REFUSAL)

    def timed_out(self, now: float) -> None:
        """The group has not answered."""
        self._fail(now, self.timeout_pause, self.timeout_pause * 2.0**TIMEOUT_DOUBLINGS)

    def trip(self) -> None:
        """The health monitor says that the ring is out of service."""
        self.state, self.open_until, self._probing = "open", math.inf, False

    def restore(self) -> None:
        """It says that the ring is back in service: one probe shows whether that is so."""
        if self.state == "open" and self.open_until == math.inf:
            self.state, self.open_until = "half_open", 0.0

    def tick(self, now: float) -> bool:
        """Becomes half-open when the open time is over; says whether it did."""
        if self.state != "open" or now < self.open_until:
            return False
        self.state, self.open_until = "half_open", 0.0
        return True

    def _fail(self, now: float, first: float, longest: float) -> None:
        """Those that were sent before it opened, and fail after, are the same failure."""
        if self.state == "open":
            return
        self._pause = min(max(first, 2 * self._pause), longest)
        self.state, self.open_until, self._probing = "open", now + self._pause, False


SLOTS = 16_384
RANKS = 2  # groups ranked per slot: the key's home, and where it goes when that one is too busy


class RendezvousHash:
    """Which of one model's groups a key belongs to, the same in every scheduler without a word between them.

    Rendezvous hashing (Thaler and Ravishankar, 1998): each group draws a number for the key, the highest wins. A
    group that comes or goes moves only its own keys. Keys are gathered into slots whose ranking is drawn once:

        key ──mod──▶ slot ──▶ [group 7, group 3]      forgotten when a group comes or goes

    0.2 ms for a slot's first key among 1,000 groups, then one lookup.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {name: _number(name) for name in names}
        self._ranked: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        if name not in self._names:
            self._names[name] = _number(name)
            self._ranked.clear()

    def remove(self, name: str) -> None:
        if self._names.pop(name, None) is not None:
            self._ranked.clear()

    def ranked(self, key: int) -> tuple[str, ...]:
        """The `RANKS` first groups for `key` (any non-negative integer), best first."""
        slot = key % SLOTS
        found = self._ranked.get(slot)
        if found is None:
            found = self._ranked[slot] = self._rank(slot)
        return found

    def _rank(self, slot: int) -> tuple[str, ...]:
        drawn = ((_draw(number, slot), name) for name, number in self._names.items())
        return tuple(name for _, name in heapq.nlargest(RANKS, drawn))


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


_WORD = (1 << 64) - 1


def _draw(number: int, slot: int) -> int:
    """64 bits of (group, slot): the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (number ^ slot * 0x9E3779B97F4A7C15) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31


IN_HAND = 256  # requests sent to one group and not answered, at most
# Sequences that may wait in a ring however few it computes at once; more of them: half as many.
MIN_BACKLOG = 8
# Seconds of prompts that may lie before a waiting sequence: a ring that has as much to do gets no more.
HORIZON = 1.0
# Batch work is sent while fewer than this share of a group's places are taken, by whatever work.
BATCH_SHARE = 0.75
SERVING = ("ready", "busy")
_OUT = ("hung", "gone")
_REPORTED = attrgetter("reported")
_ASKED = attrgetter("asked")


@dataclass(slots=True, eq=False)
class Group:
    """One group as placement sees it."""

    name: str
    model: str
    epoch: int
    status: GroupStatus
    load: GroupLoad
    breaker: CircuitBreaker
    ttft: TtftEstimator = field(default_factory=TtftEstimator)
    weight: float = 1.0  # how fast it is, against what is usual; below 1 it is degraded
    sent_requests: int = 0
    sent_tokens: int = 0
    reported: float = 0.0  # monotonic seconds of the last load report in a reply
    asked: float = 0.0  # monotonic seconds at which it was last asked how full it is, with nothing sent along
    # `at` of the last event that took it out of service: older records do not bring it back.
    lost_at: float = 0.0
    chosen: int = 0  # when it was last chosen, in decisions: equals take turns
    # Digests of the LoRA adapters that it had in memory when it was heard last.
    adapters: frozenset[str] = frozenset()
    traits: GroupTraits | None = None  # None: not known yet
    place: int = -1  # its place in the list of open groups; -1: it is not open
    cordoned: bool = False  # whether it makes room for another model: it gets nothing new

    @property
    def up(self) -> bool:
        return self.status in SERVING

    @property
    def idle(self) -> bool:
        return self.load.running + self.load.waiting == 0

    @property
    def sequences(self) -> int:
        """What the group has, and what is on its way to it."""
        return self.load.running + self.load.waiting + self.sent_requests

    @property
    def takes(self) -> bool:
        """Whether it may be given a request now."""
        return self.status in SERVING and self.breaker.allows and self.has_room and not self.cordoned

    @property
    def has_room(self) -> bool:
        slots = self.ttft.slots
        if self.sent_requests >= IN_HAND or self.sequences >= slots + max(MIN_BACKLOG, slots // 2):
            return False
        has_waiting = self.load.waiting + self.sent_requests > 0
        return not (has_waiting and self.ttft.queue_seconds >= HORIZON)

    @property
    def has_idle_capacity(self) -> bool:
        """Whether batch work would delay nobody: nothing waits, and places and memory are left over."""
        load = self.load
        if load.waiting or load.free_blocks * SCARCE_SHARE < load.total_blocks:
            return False
        return self.sequences < BATCH_SHARE * self.ttft.slots

    def may_take(self, lane: Lane) -> bool:
        return self.takes and (lane != "batch" or self.has_idle_capacity)

    def computes(self, kind: str) -> bool:
        """Whether it is known to compute this kind of sparse attention; empty: none."""
        return not kind or (self.traits is not None and kind in self.traits.sparse)

    def may_compute(self, kind: str) -> bool:
        """Whether it does, or has yet to say what it computes. One at work that says nothing is of an earlier version,
        which computes none."""
        return self.computes(kind) or (self.traits is None and not self.up)


@dataclass(slots=True)
class _Model:
    groups: dict[str, Group] = field(default_factory=dict)
    open: list[Group] = field(default_factory=list)
    ranking: RendezvousHash = field(default_factory=RendezvousHash)  # of those that are up
    usual: Usual = field(default_factory=Usual)
    # By an adapter's digest: the groups that have it in memory, by name.
    holders: dict[str, dict[str, Group]] = field(default_factory=dict)


class GroupTable:
    """All groups. Each change costs the same however many there are."""

    def __init__(self, suspect_time: float = 1.0) -> None:
        """`suspect_time`: seconds for which a group is left alone that has not answered, the first time."""
        self._suspect_time = suspect_time
        self._groups: dict[str, Group] = {}
        self._models: dict[str, _Model] = {}
        self._cordoned: dict[str, frozenset[str]] = {}  # by model
        self._closures: list[tuple[float, int, Group]] = []
        self._decisions = 0

    def get(self, name: str) -> Group | None:
        return self._groups.get(name)

    def of(self, model: str) -> Iterable[Group]:
        """Every group of `model`, whatever its state."""
        return self._of(model).groups.values()

    def open(self, model: str) -> list[Group]:
        """Groups of `model` that may be given requests. Not to be changed."""
        return self._of(model).open

    def ranking(self, model: str) -> RendezvousHash:
        """Which groups of `model` a key belongs to."""
        return self._of(model).ranking

    def holders(self, model: str, adapter: str) -> Iterable[Group]:
        """Groups of `model` that have the adapter of that digest in memory, whatever their state."""
        return self._of(model).holders.get(adapter, {}).values()

    def computing(self, model: str, kind: str) -> list[Group]:
        """Open groups of `model` that compute this kind of sparse attention. While those that do are full, away or
        still starting there are none; where it is certain that no group does, they are all open ones: a group refuses
        it with a sentence."""
        found = [group for group in self.open(model) if group.computes(kind)]
        if found or any(group.may_compute(kind) for group in self.of(model)):
            return found
        return self.open(model)

    def another_computes(self, name: str, epoch: int, model: str, kind: str) -> bool:
        """Whether a request which the ring `epoch` of a group has refused is for another group: it asks for a kind of
        sparse attention that this one, as far as is known of that ring, does not compute, and another one may."""
        group = self.get(name)
        if not kind or (group is not None and group.epoch >= epoch and group.computes(kind)):
            return False
        return any(other.may_compute(kind) for other in self.of(model) if other.name != name)

    def breakers(self) -> Iterator[tuple[str, State]]:
        """Every group's name and the state of its breaker."""
        return ((group.name, group.breaker.state) for group in self._groups.values())

    def served(self) -> Iterator[str]:
        """Every model that has a group, whatever its state."""
        return (name for name, model in self._models.items() if model.groups)

    def stalest(self, model: str, lane: Lane, count: int, before: float) -> list[Group]:
        """`count` groups at most that could be asked whether they have room for `lane` again: full as far as is
        known, and last heard of before `before` (monotonic seconds), the longest ago first.

        For batch work what counts is when they were last asked: a reply to a request names that request among
        what waits, so that a steady trickle of others' requests would keep an idle group looking busy.
        """
        heard = _ASKED if lane == "batch" else _REPORTED
        full = (
            group
            for group in self.of(model)
            if group.up and group.breaker.state == "closed" and heard(group) < before and not group.may_take(lane)
        )
        return heapq.nsmallest(count, full, key=heard)

    # --- what others say -------------------------------------------------------------------------

    def record(self, record: GroupRecord) -> None:
        """Takes in what the health monitor wrote; another epoch is another ring."""
        group = self._groups.get(record.group)
        if group is not None and record.epoch < group.epoch:
            return
        if group is None or record.epoch > group.epoch or record.model != group.model:
            self.forget(record.group)
            breaker = CircuitBreaker(self._suspect_time)
            group = Group(record.group, record.model, record.epoch, record.state, record.load, breaker)
            group.cordoned = group.name in self._cordoned.get(group.model, ())
            self._groups[group.name] = group
            self._models.setdefault(group.model, _Model()).groups[group.name] = group
        stale = group.lost_at > 0 and record.updated_at <= group.lost_at and record.state in SERVING
        if record.load.version >= group.load.version:
            group.load = record.load
        group.weight = record.weight
        group.traits = record.traits
        self._set_adapters(group, frozenset(record.adapters))
        if not group.sent_requests:
            group.ttft.rested()
        self._set_status(group, group.status if stale else record.state)

    def forget(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            return
        self._close(group)
        self._set_adapters(group, frozenset())
        model = self._of(group.model)
        model.ranking.remove(name)
        del model.groups[name]
        if not model.groups:
            del self._models[group.model]

    def event(self, event: GroupEvent) -> None:
        """Bad news travels faster as an event than as a record; for good news the record decides."""
        group = self._groups.get(event.group)
        if group is None or group.epoch > event.epoch or event.kind == "up":
            return
        group.lost_at = event.at
        self._set_status(group, "draining" if event.kind == "draining" else "gone")

    def cordon(self, model: str, names: Collection[str]) -> None:
        """Of the groups of `model` these get nothing new, and all others of it do."""
        if names:
            self._cordoned[model] = frozenset(names)
        elif self._cordoned.pop(model, None) is None:
            return
        for group in self.of(model):
            group.cordoned = group.name in names
            self._changed(group)

    # --- what this scheduler does ----------------------------------------------------------------

    def reserve(self, group: Group, tokens: int) -> None:
        """Counts a request as sent to `group`."""
        self._decisions += 1
        group.chosen = self._decisions
        group.sent_requests += 1
        group.sent_tokens += tokens
        group.breaker.sent()
        self._changed(group)

    def release(self, group: Group, tokens: int) -> None:
        """A request counted with `reserve` was answered, or was not sent after all.

        It may have been counted for the ring that `group` was before: the count never goes below zero.
        """
        group.sent_requests = max(0, group.sent_requests - 1)
        group.sent_tokens = max(0, group.sent_tokens - tokens)
        if not group.sent_requests:
            group.breaker.cancel_probe()
        self._changed(group)

    def report(self, group: Group, load: GroupLoad, now: float, seconds: float) -> None:
        """Takes in the load of a reply that came at `now` (monotonic seconds), `seconds` after its dispatch."""
        if load.version >= group.load.version:
            group.load = load
        group.reported = now
        group.ttft.answered(seconds)
        self._changed(group)

    def accepted(self, group: Group) -> None:
        """A whole batch was taken."""
        group.breaker.succeeded()
        self._changed(group)

    def refused(self, group: Group, now: float) -> None:
        """Something was refused that may be taken later."""
        group.breaker.refused(now)
        self._opened(group)

    def timed_out(self, group: Group, now: float) -> None:
        """A batch was not answered."""
        group.breaker.timed_out(now)
        self._opened(group)

    @property
    def closed(self) -> bool:
        """Whether some group gets nothing for a while: `reopen` is to be called."""
        return bool(self._closures)

    def reopen(self, now: float) -> bool:
        """Lets the groups be tried whose breaker's open time is over; says whether there were any."""
        found = False
        while self._closures and self._closures[0][0] <= now:
            group = heapq.heappop(self._closures)[2]
            if group.breaker.tick(now):
                found = True
                self._changed(group)
        return found

    # --- inside ----------------------------------------------------------------------------------

    def _of(self, model: str) -> _Model:
        """What is known of `model`; nothing is kept of one that no group has."""
        return self._models.get(model) or _Model()

    def _set_adapters(self, group: Group, adapters: frozenset[str]) -> None:
        holders = self._of(group.model).holders
        for digest in group.adapters - adapters:
            of_adapter = holders[digest]
            del of_adapter[group.name]
            if not of_adapter:
                del holders[digest]
        for digest in adapters - group.adapters:
            holders.setdefault(digest, {})[group.name] = group
        group.adapters = adapters

    def _set_status(self, group: Group, status: GroupStatus) -> None:
        group.status = status
        ranking = self._of(group.model).ranking
        if status in _OUT:
            group.breaker.trip()
        if group.up:
            group.breaker.restore()
            ranking.add(group.name)
        else:
            ranking.remove(group.name)
        self._changed(group)

    def _opened(self, group: Group) -> None:
        self._decisions += 1
        if group.breaker.state == "open":
            heapq.heappush(self._closures, (group.breaker.open_until, self._decisions, group))
        self._changed(group)

    def _changed(self, group: Group) -> None:
        """Brings the group's figures and its place among the open ones up to date."""
        usual = self._of(group.model).usual
        usual.hear(group.load)
        group.ttft.update(group.load, group.sent_requests, group.sent_tokens, group.weight, usual)
        opens = group.takes and self._groups.get(group.name) is group
        if opens and group.place < 0:
            candidates = self._of(group.model).open
            group.place = len(candidates)
            candidates.append(group)
        elif not opens:
            self._close(group)

    def _close(self, group: Group) -> None:
        """Takes the group out of the open ones; the last of them takes its place."""
        if group.place < 0:
            return
        candidates = self._of(group.model).open
        last = candidates.pop()
        if last is not group:
            candidates[group.place] = last
            last.place = group.place
        group.place = -1

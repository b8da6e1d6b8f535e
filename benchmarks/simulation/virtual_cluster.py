"""A cluster of rings in virtual time, the work that comes to it, and who places it: the scheduler's own classes.

A ring computes prompts one after another and answers side by side, one place each:

    arrive ─▶ waiting ─▶ place ─▶ uncached prompt tokens / speed ─▶ output tokens x step ─▶ ended

It knows a session's tokens if it has computed the session's last turn. A ring that fails loses all it has; its
requests come again, as after a failover, and it comes back later with an empty cache.
"""

import heapq
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.dispatcher import Batcher
from services.scheduler.fair_queue import RequestQueue
from services.scheduler.groups import GroupTable
from services.scheduler.placement import Placement, PlacementDecision
from services.scheduler.request import WaitingRequest, cost
from shared.messages import GroupEvent, GroupLoad, GroupRecord, SessionPin

STEP = 0.02  # seconds of a step
SPEED = 8000.0  # prompt tokens per second
OUTPUT = (32, 224)  # output tokens of a request, evenly distributed
TURN = (20, 180)  # prompt tokens that each turn adds
CONTEXT = 4096  # tokens after which a session begins anew
FAILOVER = 0.1  # seconds from a ring's loss until its requests come again
REPAIR = 30.0  # seconds from a ring's loss until it is back
BEAT = 1.0  # seconds between two reports of a ring's load to everybody


@dataclass(frozen=True)
class Scale:
    """How much is simulated."""

    groups: int = 1000
    sessions: int = 1_000_000
    requests: int = 2_000_000
    schedulers: int = 2
    tenants: int = 1000
    slots: int = 32
    load: float = 0.7  # of all places, on average
    skew: float = 0.5  # exponent of Zipf's law, for the activity of sessions and of tenants
    failures: int = 20

    @property
    def rate(self) -> float:
        """Requests per second that make the load."""
        seconds = STEP * sum(OUTPUT) / 2 + sum(TURN) / SPEED
        return self.load * self.slots * self.groups / seconds


@dataclass(slots=True, eq=False)
class Session:
    """A conversation."""

    number: int
    tenant: int
    tokens: int = 0
    ring: int = -1
    epoch: int = 0  # the ring that has computed its last turn, and that ring's life; -1: none has
    in_flight: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One turn of a session."""

    number: int
    session: Session
    tokens: int
    output: int
    arrived: float
    attempt: int = 0


@dataclass(slots=True, eq=False)
class Ring:
    """One group."""

    number: int
    slots: int
    epoch: int = 1
    up: bool = True
    running: set[Request] = field(default_factory=set)
    waiting: deque[Request] = field(default_factory=deque)
    waiting_tokens: int = 0
    prompts_until: float = 0.0
    version: int = 0
    up_since: float = 0.0
    _work: float = 0.0
    _since: float = 0.0

    @property
    def sequences(self) -> int:
        return len(self.running) + len(self.waiting)

    def load(self) -> GroupLoad:
        self.version += 1
        return GroupLoad(
            len(self.running), len(self.waiting), self.waiting_tokens, 100, 100, self.version, self.slots, STEP, SPEED
        )

    def count(self, now: float) -> None:
        """To be called before `sequences` changes: adds up sequences x seconds."""
        self._work += self.sequences * (now - self._since)
        self._since = now

    def take_work(self, now: float) -> float:
        """Sequences x seconds since the last time."""
        self.count(now)
        work, self._work = self._work, 0.0
        return work


@dataclass
class Measured:
    """What a run has shown."""

    first_token: list[float] = field(default_factory=list)
    followed: int = 0  # turns of sessions that had one before
    hits: int = 0  # of these, how many found their session's cache
    # Imbalance of each window: coefficient of variation, over the groups, of their mean sequences in it.
    windows: list[float] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)  # the same of the sequences at a moment
    occupied: list[float] = field(default_factory=list)  # share of the places that were taken, in each window
    failovers: int = 0
    ended: int = 0


class Cluster:
    """Rings, sessions, and the order of events."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale = scale
        self.random = random.Random(seed)
        self.rings = [Ring(number, scale.slots) for number in range(scale.groups)]
        self.measured = Measured()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._made = 0
        self._sessions: list[Session] = []
        self.schedulers = Schedulers(self)
        self._span = scale.requests / scale.rate
        self._window = min(10.0, self._span / 4)
        self._warm = min(6 * self._window, self._span / 2)

    def run(self) -> Measured:
        """Until every request has ended."""
        self.at(0.0, self._arrive)
        for ring in self.rings:
            self.at(self.random.uniform(0, BEAT), self._beats(ring))
        for _ in range(self.scale.failures):
            ring = self.random.choice(self.rings)
            self.at(self.random.uniform(self._warm, self._span), self._fails(ring))
        self.at(self._warm, self._begin_windows)
        while self._events and self.measured.ended < self.scale.requests:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return self.measured

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, happen))

    def hand_over(self, request: Request, number: int, now: float) -> None:
        """The ring `number`, which is up, accepts the request."""
        ring = self.rings[number]
        assert ring.up, "a request was sent to a ring that is known to be lost"
        ring.count(now)
        ring.waiting.append(request)
        ring.waiting_tokens += request.tokens
        self._start(ring, now)

    # --- events ----------------------------------------------------------------------------------

    def _arrive(self, now: float) -> None:
        session = self._next_session()
        session.in_flight = True
        if session.tokens > CONTEXT:
            session.tokens = 0
        session.tokens += self.random.randint(*TURN)
        request = Request(self._made, session, session.tokens, self.random.randint(*OUTPUT), now)
        self._made += 1
        if self._made < self.scale.requests:
            self.at(now + self.random.expovariate(self.scale.rate), self._arrive)
        self.schedulers.admit(request, now)

    def _start(self, ring: Ring, now: float) -> None:
        while ring.waiting and len(ring.running) < ring.slots:
            request = ring.waiting.popleft()
            ring.waiting_tokens -= request.tokens
            ring.running.add(request)
            session = request.session
            cached = session.ring == ring.number and session.epoch == ring.epoch
            if session.ring >= 0 and not request.attempt:
                self.measured.followed += 1
                self.measured.hits += cached
            uncached = min(request.tokens, TURN[1] + OUTPUT[1]) if cached else request.tokens
            ring.prompts_until = max(now, ring.prompts_until) + uncached / SPEED
            session.ring, session.epoch = ring.number, ring.epoch
            if not request.attempt:
                self.measured.first_token.append(ring.prompts_until + STEP - request.arrived)
            self.at(ring.prompts_until + request.output * STEP, self._ends(ring, ring.epoch, request))

    def _ends(self, ring: Ring, epoch: int, request: Request) -> Callable[[float], None]:
        def end(now: float) -> None:
            if ring.epoch != epoch or request not in ring.running:
                return
            ring.count(now)
            ring.running.discard(request)
            request.session.tokens += request.output
            request.session.in_flight = False
            self.measured.ended += 1
            self._start(ring, now)

        return end

    def _beats(self, ring: Ring) -> Callable[[float], None]:
        def beat(now: float) -> None:
            if ring.up:
                self.schedulers.heard(ring, now)
                self.schedulers.freed(now)
            self.at(now + BEAT, beat)

        return beat

    def _fails(self, ring: Ring) -> Callable[[float], None]:
        def fail(now: float) -> None:
            if not ring.up:
                return
            ring.count(now)
            lost = [*sorted(ring.running, key=lambda request: request.number), *ring.waiting]
            ring.running.clear()
            ring.waiting.clear()
            ring.waiting_tokens, ring.up = 0, False
            self.schedulers.lost(ring, now)
            self.at(now + FAILOVER, lambda now: self._again(lost, now))
            self.at(now + REPAIR, lambda now: self._repaired(ring, now))

        return fail

    def _again(self, lost: list[Request], now: float) -> None:
        for request in lost:
            self.measured.failovers += 1
            request.attempt += 1
            self.schedulers.admit(request, now)

    def _repaired(self, ring: Ring, now: float) -> None:
        ring.up, ring.epoch, ring.up_since, ring.prompts_until = True, ring.epoch + 1, now, now
        ring.version = 0
        self.schedulers.heard(ring, now)
        self.schedulers.freed(now)

    # --- measuring -------------------------------------------------------------------------------

    def _begin_windows(self, now: float) -> None:
        for ring in self.rings:
            ring.take_work(now)
        self.at(now + self._window, self._measure)

    def _measure(self, now: float) -> None:
        if self._made >= self.scale.requests:
            return
        steady = [ring for ring in self.rings if ring.up and ring.up_since <= now - 2 * self._window]
        work = {ring: ring.take_work(now) / self._window for ring in self.rings}
        self.measured.windows.append(variation([work[ring] for ring in steady]))
        self.measured.moments.append(variation([ring.sequences for ring in steady]))
        self.measured.occupied.append(sum(work.values()) / self.scale.slots / self.scale.groups)
        self.at(now + self._window, self._measure)

    # --- sessions --------------------------------------------------------------------------------

    def _next_session(self) -> Session:
        """A new one as often as all are to come up, else one that has been: some far more often than others."""
        known, left = len(self._sessions), self.scale.requests - self._made
        new = self.random.random() * left < self.scale.sessions - known
        for _ in range(100 if known and not new else 0):
            session = self._sessions[zipf(self.random, known, self.scale.skew)]
            if not session.in_flight:
                return session
        tenant = zipf(self.random, self.scale.tenants, self.scale.skew)
        self._sessions.append(Session(known, tenant))
        return self._sessions[-1]


def zipf(rng: random.Random, count: int, skew: float) -> int:
    """A number from 0 to `count` - 1, its probability about proportional to (number + 1) ** -skew, 0 <= skew < 1."""
    return min(count - 1, int(count * rng.random() ** (1 / (1 - skew))))


def variation(values: list[float] | list[int]) -> float:
    """Coefficient of variation: standard deviation over mean."""
    mean = sum(values) / len(values) if values else 0.0
    if not mean:
        return 0.0
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean)


MODEL = "model"
ROUND_TRIP = 0.002  # seconds of a dispatch


class _Settled:
    """A request's place in the stream, which never fails here."""

    async def ack(self) -> None: ...

    def ours(self, now: float) -> bool:
        return True

    def drop(self) -> None: ...


_SETTLED = _Settled()


class Scheduler:
    """One of our schedulers: what `services.scheduler.router` does, without NATS."""

    def __init__(self, cluster: Cluster, pins: dict[int, SessionPin], seed: int, decided: "array[float]") -> None:
        self._cluster = cluster
        self._pins = pins
        self._decided = decided
        self.table = GroupTable()
        self._placement = Placement(self.table, 4096, seed)
        self._queue = RequestQueue()
        self._batcher = Batcher(0.005, 1 << 20)
        self._requests: dict[str, Request] = {}

    def admit(self, request: Request, now: float) -> None:
        item = _waiting(request, now)
        self._requests[item.generation_id] = request
        self._queue.push(item)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Places what waits, most urgent first, until there is no room."""
        while True:
            began = time.perf_counter()
            item = self._queue.peek(MODEL)
            if item is None:
                return
            session = self._requests[item.generation_id].session.number
            pin = self._pins.get(session)
            decision = self._placement.choose(item, pin, now)
            if decision is None:
                return
            self._queue.take(item)
            self.table.reserve(decision.group, item.tokens)
            self._batcher.add(decision.group.name, item, now)
            batch = self._batcher.take(decision.group.name, now, at_once=True)
            self._decided.append(time.perf_counter() - began)
            self._pin(session, decision, now)
            for each in batch:
                self._hand_over(each, decision, now)

    def _pin(self, session: int, decision: PlacementDecision, now: float) -> None:
        if decision.reason in ("least_loaded", "moved", "relieved"):
            moved_at = now if decision.reason == "relieved" else 0.0
            self._pins[session] = SessionPin(decision.group.name, decision.group.epoch, moved_at)

    def _hand_over(self, item: WaitingRequest, decision: PlacementDecision, now: float) -> None:
        """The ring accepts, and says in its reply what it has."""
        group, request = decision.group, self._requests.pop(item.generation_id)
        number = int(group.name)
        self._cluster.hand_over(request, number, now)
        self.table.report(group, self._cluster.rings[number].load(), now, ROUND_TRIP)
        self.table.release(group, item.tokens)
        self.table.accepted(group)


class Schedulers:
    """Several schedulers side by side, each with a view of its own; pins are common, as in NATS."""

    def __init__(self, cluster: Cluster) -> None:
        self._random = cluster.random
        self.decided: array[float] = array("d")
        pins: dict[int, SessionPin] = {}
        self._schedulers = [Scheduler(cluster, pins, seed, self.decided) for seed in range(cluster.scale.schedulers)]
        for ring in cluster.rings:
            self.heard(ring, 0.0)

    def admit(self, request: Request, now: float) -> None:
        self._random.choice(self._schedulers).admit(request, now)

    def freed(self, now: float) -> None:
        for scheduler in self._schedulers:
            scheduler.pump(now)

    def heard(self, ring: Ring, now: float) -> None:
        record = GroupRecord(str(ring.number), MODEL, "ready", ring.epoch, [], ring.load(), updated_at=now)
        for scheduler in self._schedulers:
            scheduler.table.record(record)

    def lost(self, ring: Ring, now: float) -> None:
        for scheduler in self._schedulers:
            scheduler.table.event(GroupEvent(str(ring.number), MODEL, ring.epoch, "down", at=now))


def _waiting(request: Request, now: float) -> WaitingRequest:
    return WaitingRequest(
        generation_id=str(request.number),
        request_id="",
        model=MODEL,
        consumer="",
        lane="recovery" if request.attempt else "interactive",
        tenant=str(request.session.tenant),
        session=str(request.session.number),
        deadline=0.0,
        attempt=request.attempt,
        position=0,
        tokens=request.tokens,
        order=request.number,
        raw=b"",
        delivery=_SETTLED,
        cost=cost(request.tokens, request.output),
        due=now + 600.0,
    )

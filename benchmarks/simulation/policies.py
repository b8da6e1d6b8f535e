"""Who decides in a simulation: the scheduler's own classes, and what is usual elsewhere."""

import time
from array import array
from typing import ClassVar

from benchmarks.simulation.virtual_cluster import Cluster, Request, Ring
from services.scheduler.dispatcher import Batcher
from services.scheduler.fair_queue import RequestQueue
from services.scheduler.groups import GroupTable
from services.scheduler.placement import Decision, Placement
from services.scheduler.request import WaitingRequest, cost
from shared.messages import GroupEvent, GroupRecord, SessionPin

MODEL = "model"
ROUND_TRIP = 0.002
"""Seconds of a dispatch."""


class _Settled:
    """A request's place in the stream, which never fails here."""

    async def ack(self) -> None: ...

    def ours(self, now: float) -> bool:
        return True

    def drop(self) -> None: ...


_SETTLED = _Settled()


class Scheduler:
    """One of our schedulers: what `services.scheduler.router` does, without NATS."""

    def __init__(
        self, cluster: Cluster, pins: dict[int, SessionPin], seed: int, decided: "array[float]"
    ) -> None:
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
            batch = self._batcher.take(decision.group.name, now, hurry=True)
            self._decided.append(time.perf_counter() - began)
            self._pin(session, decision, now)
            for each in batch:
                self._hand_over(each, decision, now)

    def _pin(self, session: int, decision: Decision, now: float) -> None:
        if decision.reason in ("least_loaded", "moved", "relieved"):
            moved_at = now if decision.reason == "relieved" else 0.0
            self._pins[session] = SessionPin(decision.group.name, decision.group.epoch, moved_at)

    def _hand_over(self, item: WaitingRequest, decision: Decision, now: float) -> None:
        """The ring accepts, and says in its reply what it has."""
        group, request = decision.group, self._requests.pop(item.generation_id)
        number = int(group.name)
        self._cluster.hand_over(request, number, now)
        self.table.report(group, self._cluster.rings[number].load(), now, ROUND_TRIP)
        self.table.release(group, item.tokens)
        self.table.accepted(group)


class Ours:
    """Several schedulers side by side, each with a view of its own; pins are common, as in NATS."""

    def __init__(self, cluster: Cluster) -> None:
        self._random = cluster.random
        self.decided: array[float] = array("d")
        pins: dict[int, SessionPin] = {}
        self._schedulers = [
            Scheduler(cluster, pins, seed, self.decided) for seed in range(cluster.scale.schedulers)
        ]
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


class _Simple:
    """Sends each request at once, by what the rings have said last and what was sent to them since."""

    name: ClassVar[str] = ""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = cluster.random
        self.decided: array[float] = array("d")
        self._views = [[0] * cluster.scale.groups for _ in range(cluster.scale.schedulers)]
        self._turn = [0] * cluster.scale.schedulers

    def admit(self, request: Request, now: float) -> None:
        scheduler = self._random.randrange(len(self._views))
        view = self._views[scheduler]
        began = time.perf_counter()
        number = self._choose(scheduler, view)
        self._decided(began)
        self._cluster.hand_over(request, number, now)
        view[number] = self._cluster.rings[number].sequences

    def _decided(self, began: float) -> None:
        self.decided.append(time.perf_counter() - began)

    def freed(self, now: float) -> None: ...

    def heard(self, ring: Ring, now: float) -> None:
        for view in self._views:
            view[ring.number] = ring.sequences

    def lost(self, ring: Ring, now: float) -> None:
        for view in self._views:
            view[ring.number] = 1 << 30

    def _choose(self, scheduler: int, view: list[int]) -> int:
        raise NotImplementedError


class RoundRobin(_Simple):
    """One after the other."""

    def _choose(self, scheduler: int, view: list[int]) -> int:
        while True:
            self._turn[scheduler] = (self._turn[scheduler] + 1) % len(view)
            if view[self._turn[scheduler]] < 1 << 30:
                return self._turn[scheduler]


class LeastLoaded(_Simple):
    """The one with the fewest sequences, of all."""

    def _choose(self, scheduler: int, view: list[int]) -> int:
        return view.index(min(view))


class TwoChoices(_Simple):
    """The better of two at random (Mitzenmacher, 2001)."""

    def _choose(self, scheduler: int, view: list[int]) -> int:
        while True:
            one, two = self._random.randrange(len(view)), self._random.randrange(len(view))
            better = one if view[one] <= view[two] else two
            if view[better] < 1 << 30:
                return better


POLICIES: dict[str, type[Ours] | type[_Simple]] = {
    "ours": Ours,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "two choices": TwoChoices,
}


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

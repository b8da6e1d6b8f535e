"""Looks for the host that loses least by a load: one with free memory, or one where others make room. Pure.

hosts that know the model's files ──┐
hosts by their free memory ─────────┼─▶ the cheapest with room ─▶ cheaper still by unloading others? ─▶ Room
hosts whose idle groups suffice ────┘
"""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from services.scheduler.models.cluster import ClusterView, FreeMemory, Host, Replica
from services.scheduler.models.demand import NO_DEMAND, Demand
from services.scheduler.models.eviction import Worth, cheapest
from services.scheduler.models.failures import Failures
from services.scheduler.models.plans import Plans

# Hosts without room that are compared by what would have to go there, in one search; of fewer, all.
COMPARED = 32
# Share of the places of a model's other replicas that may be taken once a spare one has gone.
SPARE_SHARE = 0.6

# Which groups may make room: those without work, also those that the others of their model can do without, all.
Evictable = Literal["idle", "spare", "any"]


class Room(NamedTuple):
    """Where a model could go, and what would have to go there."""

    host: Host
    victims: tuple[Replica, ...]
    cost: float  # seconds that requests wait for it, and for what goes
    lost: float = 0.0  # of these, those for what goes


class _Found(NamedTuple):
    """A host that could take the model. The least is the best: one without a replica of it, at the least cost, with
    the largest share of its memory free."""

    home: bool
    cost: float
    share: float  # of its memory that is free, below 0
    number: int
    host: Host
    size: int

    def again(self, homes: Collection[str]) -> "_Found":
        """As it is now."""
        return self._replace(home=self.host.name in homes, share=-self.host.share_free)


class _Offers:
    """The hosts that may take one model. Within a pass they get worse only: by loads that are promised."""

    def __init__(self, size: int, cost: float, knowing: Collection[int], blocked: Collection[str]) -> None:
        """`size` and `cost` on a host that says nothing of it; `knowing`: numbers of those that do; `blocked`: names
        of hosts where it is not tried now."""
        self.size = size
        self.cost = cost
        self.fitting: list[_Found] = []  # hosts with room that know the model: a heap
        self.full: list[_Found] = []  # hosts where others would have to make room
        self._knowing = knowing
        self._blocked = blocked

    def takes(self, host: Host) -> bool:
        """Whether it may be tried there; not where nobody knows yet what is left."""
        return host.name not in self._blocked and not (host.promised and 0 in host.promised.values())

    def best(self, homes: Collection[str], free: FreeMemory) -> _Found | None:
        """The best of those with room."""
        known, other = self._best_known(homes), self._best_other(homes, free)
        return min(known, other) if known is not None and other is not None else known or other

    def _best_known(self, homes: Collection[str]) -> _Found | None:
        while self.fitting:
            found = self.fitting[0]
            now = found.again(homes)
            if found.host.free < found.size:
                self.full.append(heapq.heappop(self.fitting))
            elif now[:3] == found[:3]:
                return found if self.takes(found.host) else None
            else:
                heapq.heapreplace(self.fitting, now)
        return None

    def _best_other(self, homes: Collection[str], free: FreeMemory) -> _Found | None:
        first: _Found | None = None
        for host in free:
            if host.free < self.size or host.number in self._knowing or not self.takes(host):
                continue
            home = host.name in homes
            if first is None or not home:
                first = _Found(home, self.cost, -host.share_free, host.number, host, self.size)
            if not home:
                break
        return first


class RoomSearch:
    """For one pass, in which hosts change by its own plans alone. One that loses its room by them is not asked to make
    some before the next pass, unless it knows the model."""

    def __init__(
        self,
        cluster: ClusterView,
        plans: Plans,
        failures: Failures,
        worth: Worth,
        demand: Mapping[str, Demand],
        turn: int,
    ) -> None:
        """`turn`: any number that is another one in the next pass."""
        self._cluster = cluster
        self._plans = plans
        self._failures = failures
        self._worth = worth
        self._demand = demand
        self._turn = turn
        self._offers: dict[tuple[str, Evictable], _Offers] = {}
        self.compared = 0  # hosts whose groups were compared so far, in all searches: what makes a pass long

    def find(self, model: str, now: float, evictable: Evictable) -> Room | None:
        """The host that loses least; one without a replica of the model, where there is any."""
        homes = {replica.host for replica in self._cluster.of(model)}
        homes.update(plan.host for plan in self._plans.of(model))
        offers = self._offers.get((model, evictable))
        if offers is None:
            offers = self._offers[model, evictable] = self._look(model, homes, now, evictable)
        best = offers.best(homes, self._cluster.free)
        room = None if best is None else Room(best.host, (), best.cost)
        key = (True, math.inf, 0.0) if best is None else best[:3]
        for known in self._some(offers.full):
            found = known.again(homes)
            if found[:2] >= key[:2] or not offers.takes(found.host):
                continue
            made = self._with_victims(found, model, evictable)
            if made is not None and (found.home, made.cost, found.share) < key:
                room, key = made, (found.home, made.cost, found.share)
        return room

    def _look(self, model: str, homes: Collection[str], now: float, evictable: Evictable) -> _Offers:
        cluster = self._cluster
        knowing = cluster.knowing(model)
        weight = max(1, self._demand.get(model, NO_DEMAND).waiting)
        size, seconds = cluster.elsewhere(model)
        offers = _Offers(size, weight * seconds, knowing, self._failures.blocked(model, now))
        for host in knowing.values():
            if host.takes:
                size = cluster.size(model, host)
                cost = weight * cluster.load_seconds(model, host)
                self._sort(offers, host, size, cost, homes, evictable)
        heapq.heapify(offers.fitting)
        for host in cluster.free:
            if host.free < offers.size and host.number not in knowing:
                self._sort(offers, host, offers.size, offers.cost, homes, evictable)
        return offers

    @staticmethod
    def _sort(
        offers: _Offers, host: Host, size: int, cost: float, homes: Collection[str], evictable: Evictable
    ) -> None:
        """Notes a host as one with room, as one that could make room, or not at all."""
        if host.free >= size:
            chosen = offers.fitting
        elif (evictable != "idle" and host.memory >= size) or host.free + host.idle >= size:
            chosen = offers.full
        else:
            return
        if offers.takes(host):
            chosen.append(_Found(host.name in homes, cost, -host.share_free, host.number, host, size))

    def _some(self, full: list[_Found]) -> list[_Found]:
        """Of many hosts without room those that would have the model soonest, others in turn."""
        if len(full) <= COMPARED:
            return sorted(full)
        half = COMPARED // 2
        begin = self._turn * half % len(full)
        return heapq.nsmallest(half, full) + (full + full)[begin : begin + half]

    def _with_victims(self, found: _Found, model: str, evictable: Evictable) -> Room | None:
        self.compared += 1
        host, lacking = found.host, found.size - found.host.free
        candidates = list(self._candidates(host, model, evictable))
        if sum(replica.memory for replica in candidates) < lacking:
            return None
        spare = {replica.model: self._plans.staying(replica.model) > 1 for replica in candidates}
        chosen = cheapest(
            candidates, lacking, lambda replica: self._worth.of(replica, host, spare=spare[replica.model])
        )
        return None if chosen is None else Room(host, chosen[0], found.cost + chosen[1], chosen[1])

    def _candidates(self, host: Host, model: str, evictable: Evictable) -> Iterator[Replica]:
        """Groups on the host that may make room."""
        chosen: Counter[str] = Counter()
        for replica in sorted(host.replicas.values(), key=lambda replica: replica.idle_since):
            name = replica.model
            if name == model or replica.draining or self._worth.keeps(replica) or self._plans.goes(replica):
                continue
            staying = self._plans.staying(name) - chosen[name]
            if staying <= self._worth.least(name) or self._worth.stays(replica, host, model):
                continue
            if evictable == "any" or self._may_go(replica, staying, evictable):
                chosen[name] += 1
                yield replica

    def _may_go(self, replica: Replica, staying: int, evictable: Evictable) -> bool:
        """Whether nobody waits longer because it goes; `staying`: replicas of its model, it among them."""
        name = replica.model
        if replica.idle:
            return staying > 1 or not self._worth.waits(name)
        places = self._cluster.replicas(name).slots * (staying - 1)
        return evictable == "spare" and staying > 1 and self._plans.inside(name) <= SPARE_SHARE * places

"""What a host can give up for a model, and what that costs. Pure.

cost of a group = how likely its model is asked for within HORIZON x what loading it again costs then
cost of a load  = what must go + seconds until it is there x requests that wait for it
"""

import math
from collections.abc import Callable, Iterable, Mapping

from services.scheduler.models.cluster import ClusterView, Host, Replica
from services.scheduler.models.demand import NO_DEMAND, Demand
from shared.messages import ModelSpec

HORIZON = 600.0  # seconds that one looks ahead: a model that is not asked for within them may go for nothing
# A model that is asked for serves for so many times as long as its load takes before it makes room, at most, and one
# that works for `BUSY_STAY` times as long as that: of the time in which both of two models always have work, at most a
# ninth is spent on loading.
RESIDENCE = 4.0
BUSY_STAY = 2.0
FIRST_TURN = 0.5  # seconds that a model serves at least: what has waited for it reaches it within them
SHORTEST_STAY, LONGEST_STAY = 2.0, 120.0  # seconds of `RESIDENCE`


class Worth:
    """What each group is worth at one moment."""

    def __init__(
        self, cluster: ClusterView, specs: Mapping[str, ModelSpec], demand: Mapping[str, Demand], now: float
    ) -> None:
        self._cluster = cluster
        self._specs = specs
        self._demand = demand
        self._now = now
        self._chance: dict[str, float] = {}

    def chance(self, model: str) -> float:
        """How likely the model is asked for within `HORIZON`."""
        found = self._chance.get(model)
        if found is None:
            demand = self._demand.get(model, NO_DEMAND)
            found = self._chance[model] = 1.0 - math.exp(-demand.popularity * HORIZON)
        return found

    def of(self, replica: Replica, host: Host, *, spare: bool) -> float:
        """Seconds that requests are expected to wait because the group has gone; `spare`: others serve its model."""
        demand = self._demand.get(replica.model, NO_DEMAND)
        seconds = self._cluster.load_seconds(replica.model, host)
        if spare:
            return 0.1 * seconds * self.chance(replica.model)
        return seconds * self.chance(replica.model) * (1.0 + demand.rate * seconds)

    def stays(self, replica: Replica, host: Host, model: str) -> bool:
        """Whether it was loaded too lately to go for `model`.

        One in which nothing runs goes once the requests for `model` have waited, all together, for as long as those
        that are expected for it while it is loaded anew would wait then. (Who rents until the rent is what buying
        costs never pays more than twice of the least.) One that nobody has asked for since it is there goes at once:
        so it is where requests for two models alternate. `FIRST_TURN` is every model's.
        """
        if not replica.ready:
            return True
        said = self._cluster.reported(replica.model, host)
        seconds = said.load_seconds if said is not None else 0.0
        seconds = seconds or replica.ready_at - replica.seen_at
        stay = min(max(RESIDENCE * seconds, SHORTEST_STAY), LONGEST_STAY)
        served = self._now - replica.ready_at
        if not replica.idle:
            return served < BUSY_STAY * stay
        own, other = self._demand.get(replica.model, NO_DEMAND), self._demand.get(model, NO_DEMAND)
        if served < FIRST_TURN or served >= stay or not other.waiting:
            return served < stay
        waited = other.waiting * (self._now - other.since)
        return own.last > replica.ready_at and waited < own.rate * seconds * seconds

    def waits(self, model: str) -> bool:
        """Whether requests wait for it now."""
        return self._demand.get(model, NO_DEMAND).waiting > 0

    def keeps(self, replica: Replica) -> bool:
        """Whether it never makes room: its model is pinned or in no registry, or its host loads no models."""
        spec = self._specs.get(replica.model)
        return spec is None or spec.pinned or not self._cluster.obeys(replica)

    def least(self, model: str) -> int:
        spec = self._specs.get(model)
        return spec.least if spec is not None else 0


def cheapest(
    candidates: Iterable[Replica], needed: int, cost: Callable[[Replica], float]
) -> tuple[tuple[Replica, ...], float] | None:
    """Groups that together free `needed` bytes at little cost, and that cost; None: they do not free as much.

    By cost per byte, then without those that turn out to be needless, the dearest first; the least recently used of
    equals go first.
    """
    priced = [(cost(replica), replica) for replica in candidates]
    priced.sort(key=lambda item: (item[0] / max(1, item[1].memory), item[1].idle_since, item[1].group))
    chosen: list[tuple[float, Replica]] = []
    freed = 0
    for price, replica in priced:
        if freed >= needed:
            break
        chosen.append((price, replica))
        freed += replica.memory
    if freed < needed:
        return None
    for item in sorted(chosen, key=lambda item: (-item[0], -item[1].memory)):
        if freed - item[1].memory >= needed:
            chosen.remove(item)
            freed -= item[1].memory
    return tuple(replica for _, replica in chosen), sum(price for price, _ in chosen)

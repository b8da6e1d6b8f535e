"""Hosts that load models in virtual time, and the requests that come for these models: one trace for every policy.

    each second: requests arrive (Poisson, Zipf over models) ─▶ free places of the model's groups, the emptiest first
                 the others wait in order ─▶ some end ─▶ the policy loads and unloads ─▶ the next second

Popularity changes: every `drift` seconds a tenth of the models trade places in the ranking with others. A load takes
the model's bytes over the bandwidth from where its weights lie: the host's memory, its disk, or the hub.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.scheduler.models.cluster import DISK_BANDWIDTH, LOAD_BASE, SLEEP_BANDWIDTH

GB = 1_000_000_000
HUB_BANDWIDTH = 1e9
"""A mirror in the same data centre."""
HOSTS = (80, 160, 320, 640)
"""GB of memory for models."""
SIZES = (1, 140)
"""GB of a group, weights and KV cache; evenly distributed by their logarithms."""
SLOTS = 64
SERVICE = 20.0
"""Seconds of a generation, exponentially distributed."""
FIRST_TOKEN = 0.2
"""Seconds to the first token of a request that has a place at once."""
PATIENCE = 600.0
"""Seconds after which a request is given up."""
STORED = 40
"""Models on a host's disk."""
ASLEEP = 256 * GB
"""Bytes of a host's memory for weights that sleep."""
MOST = 4096
"""Replicas of a model."""


@dataclass(frozen=True)
class Scale:
    """How much is simulated."""

    hosts: int = 1000
    models: int = 300
    skew: float = 1.0
    """Exponent of Zipf's law."""
    load: float = 0.6
    """Share of all memory that the replicas would take which are needed for three quarters of their places."""
    seconds: int = 3600
    warm_up: int = 900
    drift: int = 300
    """Seconds between two changes of popularity; 0: none."""


@dataclass(slots=True, eq=False)
class Group:
    """A replica. Its sequences are counted in `Yard.running`, at `place`."""

    name: str
    model: int
    host: int
    place: int
    ready_at: float
    draining: bool = False
    used_at: float = 0.0


@dataclass(slots=True, eq=False)
class Host:
    """A host: what it serves, what sleeps in its memory, what lies on its disk."""

    number: int
    memory: int
    free: int
    groups: dict[str, Group] = field(default_factory=dict)
    asleep: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    stored: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    load_seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class Measured:
    """What became of the requests, after the warm-up."""

    arrived: int = 0
    hits: int = 0
    """Had a place at once."""
    cold: int = 0
    """Came while no group served their model."""
    given_up: int = 0
    loads: int = 0
    waits: dict[float, int] = field(default_factory=dict)
    """Requests by the seconds that they have waited."""
    decided: list[float] = field(default_factory=list)
    """Seconds of CPU time of each pass of our placement."""


class Policy(Protocol):
    """Who decides what is loaded."""

    def begin(self, yard: "Yard") -> None: ...

    def decide(self, yard: "Yard") -> None: ...


class Yard:
    """Everything that happens."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale = scale
        self.seed = seed
        self.now = 0.0
        self.measured = Measured()
        self._random = np.random.default_rng(seed)
        """Of hosts, models, popularity and arrivals: the same for every policy."""
        self._ends = np.random.default_rng(seed + 1)
        memory = self._random.choice(HOSTS, scale.hosts)
        self.hosts = [Host(number, int(size) * GB, int(size) * GB) for number, size in enumerate(memory)]
        logs = self._random.uniform(math.log(SIZES[0]), math.log(SIZES[1]), scale.models)
        largest = max(host.memory for host in self.hosts)
        self.sizes = [min(int(math.exp(log) * GB), int(0.9 * largest)) for log in logs]
        shares = 1.0 / np.arange(1, scale.models + 1) ** scale.skew
        self._shares = shares / shares.sum()
        self._ranks = self._random.permutation(scale.models)
        """The rank of each model."""
        self.rate = self._total_rate()
        self.waiting: list[deque[list[float]]] = [deque() for _ in range(scale.models)]
        """By model: [second of arrival, requests], the oldest first."""
        self.queued = [0] * scale.models
        self.groups: list[dict[str, Group]] = [{} for _ in range(scale.models)]
        self.running = np.zeros(1024, dtype=np.int64)
        self._free_places = list(range(1023, -1, -1))
        self.arrivals = np.zeros(scale.models, dtype=np.int64)
        self.asked_at = [-math.inf] * scale.models

    def foretell(self) -> list[tuple[int, np.ndarray]]:
        """What `rates` will say, and from which second on; for whoever may know the future."""
        copy = Yard(self.scale, self.seed)
        told = [(0, copy.rates())]
        for second in range(self.scale.warm_up + self.scale.seconds):
            if copy._drift(second):
                told.append((second, copy.rates()))
            copy._random.poisson(copy.rates())  # as the arrivals are drawn
        return told

    def rates(self) -> np.ndarray:
        """Requests per second of each model, now."""
        return np.asarray(self.rate * self._shares[self._ranks])

    def _total_rate(self) -> float:
        """At which the replicas that are needed take `load` of all memory."""
        memory = sum(host.memory for host in self.hosts) * self.scale.load
        shares = self._shares[self._ranks]
        per_request = SERVICE / (0.75 * SLOTS)
        low, high = 0.0, 1e9
        for _ in range(60):
            rate = (low + high) / 2
            needed = np.ceil(rate * shares * per_request)
            low, high = (rate, high) if float((needed * self.sizes).sum()) < memory else (low, rate)
        return low

    # --- what policies do ------------------------------------------------------------------------

    def serving(self, model: int) -> list[Group]:
        return [
            group
            for group in self.groups[model].values()
            if not group.draining and group.ready_at <= self.now
        ]

    def idle(self, group: Group) -> bool:
        return not self.running[group.place]

    def load(self, model: int, host: Host, *, name: str = "", warm: bool = False) -> None:
        """Begins a load; `warm`: it is there already. Memory must suffice."""
        size = self.sizes[model]
        assert host.free >= size, "memory is exceeded"
        host.free -= size
        if not self._free_places:
            more = len(self.running)
            self.running = np.concatenate([self.running, np.zeros(more, dtype=np.int64)])
            self._free_places = list(range(2 * more - 1, more - 1, -1))
        seconds = 0.0 if warm else self._load_seconds(model, host)
        place = self._free_places.pop()
        name = name or f"{host.number}/{model}/{place}"
        group = Group(name, model, host.number, place, self.now + seconds, used_at=self.now + seconds)
        self.groups[model][group.name] = host.groups[group.name] = group
        if self.now > self.scale.warm_up:
            self.measured.loads += 1
        host.stored[model] = None
        host.stored.move_to_end(model)
        if len(host.stored) > STORED:
            host.load_seconds.pop(host.stored.popitem(last=False)[0], None)
        host.load_seconds[model] = LOAD_BASE + size / DISK_BANDWIDTH

    def _load_seconds(self, model: int, host: Host) -> float:
        size = self.sizes[model]
        if model in host.asleep:
            del host.asleep[model]
            return LOAD_BASE + size / SLEEP_BANDWIDTH
        from_disk = LOAD_BASE + size / DISK_BANDWIDTH
        return from_disk if model in host.stored else from_disk + size / HUB_BANDWIDTH

    def unload(self, group: Group) -> None:
        """Its group gets nothing more, and goes when nothing runs in it."""
        group.draining = True
        self._reap(group)

    def _reap(self, group: Group) -> None:
        if self.running[group.place]:
            return
        host = self.hosts[group.host]
        del self.groups[group.model][group.name], host.groups[group.name]
        self._free_places.append(group.place)
        host.free += self.sizes[group.model]
        host.asleep[group.model] = None
        while sum(self.sizes[model] for model in host.asleep) > ASLEEP:
            host.asleep.popitem(last=False)

    # --- time ------------------------------------------------------------------------------------

    def run(self, policy: Policy) -> Measured:
        policy.begin(self)
        for second in range(self.scale.warm_up + self.scale.seconds):
            self.now = float(second)
            self._end()
            self._drift(second)
            self._arrive()
            policy.decide(self)
        for model, queue in enumerate(self.waiting):
            for at, count in queue:
                self._note(self.now - at, int(count))
            self.queued[model] = 0
        return self.measured

    @property
    def _counts(self) -> bool:
        return self.now >= self.scale.warm_up

    def _end(self) -> None:
        """Generations end."""
        ended = self._ends.binomial(self.running, 1.0 - math.exp(-1.0 / SERVICE))
        self.running -= ended
        for model in self.groups:
            for group in [group for group in model.values() if group.draining]:
                self._reap(group)

    def _drift(self, second: int) -> bool:
        """Whether popularity has changed."""
        if not self.scale.drift or not second or second % self.scale.drift:
            return False
        moved = self._random.choice(self.scale.models, max(2, self.scale.models // 10), replace=False)
        self._ranks[moved] = self._ranks[self._random.permutation(moved)]
        return True

    def _arrive(self) -> None:
        self.arrivals = self._random.poisson(self.rates())
        for model in range(self.scale.models):
            count = int(self.arrivals[model])
            if not count and not self.queued[model]:
                continue
            serving = self.serving(model)
            if count:
                self.asked_at[model] = self.now
                if self._counts:
                    self.measured.arrived += count
                    self.measured.cold += 0 if serving else count
                self.waiting[model].append([self.now, count])
                self.queued[model] += count
            self._place(model, serving)

    def _place(self, model: int, serving: list[Group]) -> None:
        places = self._fill(serving, self.queued[model])
        self.queued[model] -= places
        queue = self.waiting[model]
        while queue and places:
            at, count = queue[0]
            taken = min(places, int(count))
            places -= taken
            queue[0][1] -= taken
            self._note(self.now - at, taken)
            if not queue[0][1]:
                queue.popleft()
        while queue and self.now - queue[0][0] > PATIENCE:
            at, count = queue.popleft()
            self.queued[model] -= int(count)
            self.measured.given_up += int(count)
            self._note(PATIENCE, int(count))

    def _note(self, seconds: float, count: int) -> None:
        if self._counts and self.now - seconds >= self.scale.warm_up:
            self.measured.hits += count if not seconds else 0
            self.measured.waits[seconds] = self.measured.waits.get(seconds, 0) + count

    def _fill(self, serving: Iterable[Group], wanted: int) -> int:
        """Places requests on the emptiest groups first; returns how many found a place."""
        heap = [
            (int(self.running[group.place]), group.place, group) for group in serving if self.takes(group)
        ]
        heapq.heapify(heap)
        placed = 0
        while placed < wanted and heap:
            busy, place, group = heap[0]
            if busy >= SLOTS:
                break
            step = min(4, SLOTS - busy, wanted - placed)
            placed += step
            group.used_at = self.now
            self.running[place] += step
            heapq.heapreplace(heap, (busy + step, place, group))
        return placed

    def takes(self, group: Group) -> bool:
        """Whether it gets new requests; policies may cordon groups."""
        return group.name not in self.cordoned

    cordoned: frozenset[str] = frozenset()

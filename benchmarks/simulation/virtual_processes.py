"""The control plane's processes in virtual time: requests/s and latencies of several, from measured CPU times.

    client ─▶ gateway ─▶ NATS ─▶ scheduler ─▶ NATS ─▶ ring ─┬─▶ NATS ─▶ gateway ─▶ client     for each token
                                                            └─ the next token meanwhile

A process does one thing after the other, first come first served, on a core of its own, or where `cores` are few on
the next one that is free. NATS counts as a process with one core: that its threads use more is not assumed.
What is left out: steps (each ring makes tokens for all of its sequences together), pauses of the garbage collector
and of the system. What a request waits for without computing is `pause_ms`, the same for all.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

GATEWAY, NATS, SCHEDULER, EXECUTOR, CLIENT = "gateway", "nats", "scheduler", "executor", "client"
PARTS = (GATEWAY, NATS, SCHEDULER, EXECUTOR)
WARM_UP = 0.2
"""Share of a run's requests that are not counted."""


@dataclass(frozen=True)
class Demand:
    """CPU milliseconds of a kind of process: once for a request, and for each of its tokens."""

    request: float
    token: float = 0.0

    def of(self, tokens: int) -> float:
        return self.request + tokens * self.token

    def times(self, factor: float) -> "Demand":
        return Demand(self.request * factor, self.token * factor)


@dataclass(frozen=True)
class Shape:
    """How many there are of what."""

    gateways: int = 1
    schedulers: int = 1
    rings: int = 1
    cores: int = 0
    """That all processes share, the client's too; 0: each has its own, and the client costs nothing."""

    def count(self, part: str) -> int:
        return {GATEWAY: self.gateways, SCHEDULER: self.schedulers, EXECUTOR: self.rings}.get(part, 1)


@dataclass(frozen=True)
class Load:
    """What clients do: Poisson arrivals at `rate` requests/s, or so many `connections` that ask again at once."""

    tokens: int
    requests: int = 20_000
    rate: float = 0.0
    connections: int = 0
    pause_ms: float = 0.0


@dataclass(frozen=True)
class Found:
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    """Of whole answers."""
    busy: Mapping[str, float]
    """Cores that each kind of process has used."""


def most(demands: Mapping[str, Demand], shape: Shape, tokens: int) -> tuple[float, str]:
    """Requests/s at which the first kind of process is always busy, each with a core of its own; and which."""
    bounds = {part: shape.count(part) * 1e3 / demands[part].of(tokens) for part in PARTS}
    first = min(bounds, key=lambda part: bounds[part])
    return bounds[first], first


def rings_for(demands: Mapping[str, Demand], shape: Shape, tokens: int, share: float) -> int:
    """Rings that are busy for at most `share` of the time where the others can do no more."""
    others = {part: demand for part, demand in demands.items() if part != EXECUTOR}
    rate, _ = most({**others, EXECUTOR: Demand(1e-9)}, shape, tokens)
    return max(1, math.ceil(rate * demands[EXECUTOR].of(tokens) / 1e3 / share))


@dataclass(slots=True, eq=False)
class _Process:
    kind: str
    busy: bool = False
    waits: bool = False
    """For a core."""
    queue: "deque[tuple[float, _Flow]]" = field(default_factory=deque)


_Flow = Generator[tuple[_Process, float], None, None]


class Processes:
    """One run: `run` gives what it has come to."""

    def __init__(self, demands: Mapping[str, Demand], shape: Shape, load: Load, seed: int = 0) -> None:
        self._demands = demands
        self._load = load
        self._random = random.Random(seed)
        self._all = {kind: [_Process(kind) for _ in range(shape.count(kind))] for kind in (*PARTS, CLIENT)}
        self._free = shape.cores or sum(map(len, self._all.values()))
        self._client = demands.get(CLIENT, Demand(0.0)) if shape.cores else Demand(0.0)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._for_core: deque[_Process] = deque()
        self._used = dict.fromkeys(self._all, 0.0)
        self._begun = 0
        self._ended: list[tuple[float, float]] = []
        """Of each request: when, and its milliseconds."""

    def run(self) -> Found:
        if self._load.rate:
            self._arrive()
        for _ in range(self._load.connections):
            self._begin()
        while self._events and len(self._ended) < self._load.requests:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self._found()

    def _found(self) -> Found:
        counted = self._ended[int(WARM_UP * len(self._ended)) :]
        seconds = (counted[-1][0] - counted[0][0]) / 1e3
        took = sorted(took for _, took in counted)
        p50, p99 = (took[math.ceil(share * len(took)) - 1] for share in (0.50, 0.99))
        busy = {kind: used / self._now for kind, used in self._used.items()}
        return Found((len(counted) - 1) / seconds, p50, p99, busy)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    # --- requests ----------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self._begin()
        if self._begun < self._load.requests:
            self._at(self._now + self._random.expovariate(self._load.rate) * 1e3, self._arrive)

    def _begin(self) -> None:
        self._begun += 1
        self._go_on(self._request())

    def _any(self, kind: str) -> _Process:
        return self._random.choice(self._all[kind])

    def _request(self) -> _Flow:
        began, need = self._now, self._demands
        gateway, ring, nats = self._any(GATEWAY), self._any(EXECUTOR), self._any(NATS)
        yield gateway, need[GATEWAY].request
        yield nats, need[NATS].request / 2
        yield self._any(SCHEDULER), need[SCHEDULER].of(self._load.tokens)
        yield nats, need[NATS].request / 2
        yield ring, need[EXECUTOR].request
        for left in reversed(range(self._load.tokens)):
            yield ring, need[EXECUTOR].token
            self._go_on(self._token(gateway, nats, began, last=not left))

    def _token(self, gateway: _Process, nats: _Process, began: float, last: bool) -> _Flow:
        yield nats, self._demands[NATS].token
        yield gateway, self._demands[GATEWAY].token
        if last:
            yield self._all[CLIENT][0], self._client.of(self._load.tokens)
            self._at(self._now + self._load.pause_ms, lambda: self._end(began))

    def _end(self, began: float) -> None:
        self._ended.append((self._now, self._now - began))
        if self._load.connections:
            self._begin()

    # --- processes and cores -----------------------------------------------------------------------

    def _go_on(self, flow: _Flow) -> None:
        step = next(flow, None)
        if step is not None:
            process, took = step
            process.queue.append((took, flow))
            self._work(process)

    def _work(self, process: _Process) -> None:
        if process.busy or not process.queue:
            return
        if not self._free:
            if not process.waits:
                process.waits = True
                self._for_core.append(process)
            return
        took, flow = process.queue.popleft()
        process.busy = True
        self._free -= 1
        self._used[process.kind] += took
        self._at(self._now + took, lambda: self._done(process, flow))

    def _done(self, process: _Process, flow: _Flow) -> None:
        process.busy = False
        self._free += 1
        if self._for_core:
            other = self._for_core.popleft()
            other.waits = False
            self._work(other)
        self._go_on(flow)
        self._work(process)

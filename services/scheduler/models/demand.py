"""How much is asked of each model, by what every scheduler and gateway says. Pure: times come in as unix seconds.

schedulers ── SchedulerDemand, every second ──▶ ┐
gateways ──── ModelDemand, while they hold some ▶ ┴─ waiting, oldest, last, rate, popularity per model
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from shared.messages import ModelDemand, SchedulerDemand, WaitingModel
from shared.messages.registry import MAX_MODELS

MAX_REPORTERS = 1024  # schedulers and gateways that are told apart; those beyond are not heard
LATEST_TIME = 5.0  # seconds over which the requests are averaged that come just now
SERVICE_TIME = 60.0  # seconds over which requests that end are averaged
ENDED_ENOUGH = 8.0  # requests that must have ended lately before one knows how long they take
CLEARED = 60.0  # seconds within which replicas that are ordered clear a backlog
KEPT = 5.0  # seconds for which what a scheduler or gateway has said counts: one that died holds nothing up
RATE_TIME = 60.0
# Seconds over which requests are averaged: for what is asked now, and for what is worth its memory.
POPULARITY_TIME = 3600.0


@dataclass(slots=True)
class Demand:
    """Of one model, all schedulers and gateways together."""

    waiting: int = 0  # requests that no group has taken
    since: float = 0.0  # Unix seconds since which the first of them waits
    last: float = 0.0  # Unix seconds of the last request; 0: none is known of
    rate: float = 0.0  # requests per second, lately
    popularity: float = 0.0  # requests per second, over the last hour or so
    latest: float = 0.0  # requests per second, just now
    arrived: int = 0  # requests since somebody counts them


NO_DEMAND = Demand()


@dataclass(slots=True)
class _Average:
    """Requests per second, older ones counting less and less."""

    time: float
    value: float = 0.0
    at: float = 0.0

    def add(self, count: int, now: float) -> None:
        self.value = self.read(now) + count / self.time
        self.at = now

    def read(self, now: float) -> float:
        return self.value * math.exp(-max(0.0, now - self.at) / self.time) if self.value else 0.0


@dataclass(slots=True)
class _Asked:
    """What is known of one model's requests."""

    last: float = 0.0
    rate: _Average = field(default_factory=lambda: _Average(RATE_TIME))
    popularity: _Average = field(default_factory=lambda: _Average(POPULARITY_TIME))
    latest: _Average = field(default_factory=lambda: _Average(LATEST_TIME))
    count: int = 0

    def arrived(self, count: int, at: float, now: float) -> None:
        self.last = max(self.last, at)
        self.count += count
        self.latest.add(count, now)
        self.rate.add(count, now)
        self.popularity.add(count, now)


@dataclass(slots=True)
class _Reporter:
    at: float = 0.0
    # By model: requests, and since when the first of them waits.
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)


class DemandTracker:
    """Bounded: `MAX_MODELS` models, `MAX_REPORTERS` that tell of them."""

    def __init__(self) -> None:
        self._reporters: dict[str, _Reporter] = {}
        self._asked: dict[str, _Asked] = {}

    def report(self, said: SchedulerDemand, now: float) -> None:
        """Takes in what a scheduler says of all of its queue."""
        known = f"scheduler {said.scheduler}" in self._reporters
        reporter = self._reporter(f"scheduler {said.scheduler}", now)
        if reporter is None:
            return
        models = said.models[:MAX_MODELS]
        reporter.waiting = {item.model: (item.waiting, now - item.oldest) for item in models if item.waiting}
        for item in models:
            self._count(reporter, item, now, known=known)

    def _count(self, reporter: _Reporter, item: WaitingModel, now: float, *, known: bool) -> None:
        """`known`: whether we have heard of this scheduler before: what it counted until then is no news."""
        before = reporter.arrived.get(item.model, 0 if known else item.arrived)
        reporter.arrived[item.model] = item.arrived
        asked = self._model(item.model)
        if asked is None:
            return
        if item.arrived > before:
            asked.arrived(item.arrived - before, now - item.idle, now)
        elif item.arrived:
            asked.last = max(asked.last, now - item.idle)

    def on_held(self, said: ModelDemand, now: float) -> None:
        """Takes in that a gateway holds requests for a model of which no card is known yet."""
        reporter = self._reporter(f"gateway {said.gateway}", now)
        asked = self._model(said.model)
        if reporter is None or asked is None:
            return
        count, since = reporter.waiting.pop(said.model, (0, now))
        if said.waiting > 0:
            reporter.waiting[said.model] = said.waiting, since
        if said.waiting > count:
            asked.arrived(said.waiting - count, now, now)

    def keep(self, models: Collection[str], now: float) -> None:
        """Forgets every model that is none of these, and who has been silent."""
        for name in [name for name in self._asked if name not in models]:
            del self._asked[name]
        for name in [name for name, said in self._reporters.items() if now - said.at > KEPT]:
            del self._reporters[name]
        for reporter in self._reporters.values():
            for model in [model for model in reporter.arrived if model not in models]:
                del reporter.arrived[model]

    def all(self, now: float) -> dict[str, Demand]:
        """Of every model that is or was asked for."""
        found = {
            name: Demand(
                last=asked.last,
                rate=asked.rate.read(now),
                popularity=asked.popularity.read(now),
                latest=asked.latest.read(now),
                arrived=asked.count,
            )
            for name, asked in self._asked.items()
        }
        for model, count, since in self._waiting(now):
            if (demand := found.get(model)) is None:
                continue
            demand.since = min(demand.since, since) if demand.waiting else since
            demand.waiting += count
            demand.last = max(demand.last, since)
        return found

    def _waiting(self, now: float) -> Iterator[tuple[str, int, float]]:
        for reporter in self._reporters.values():
            if now - reporter.at <= KEPT:
                for model, (count, since) in reporter.waiting.items():
                    yield model, count, since

    def _reporter(self, name: str, now: float) -> _Reporter | None:
        reporter = self._reporters.get(name)
        if reporter is None:
            if len(self._reporters) >= MAX_REPORTERS:
                return None
            reporter = self._reporters[name] = _Reporter()
        reporter.at = now
        return reporter

    def _model(self, name: str) -> _Asked | None:
        asked = self._asked.get(name)
        if asked is None and len(self._asked) < MAX_MODELS:
            asked = self._asked[name] = _Asked()
        return asked


class ConcurrencyEstimator:
    """How many requests each model will have at a time, waiting or running.

        requests that ended = those that came - those that are there     (averaged over `SERVICE_TIME`)
        seconds of a request = those inside / those that end per second  (Little's law)
        expected = those that come, times their seconds + what clears the backlog within `CLEARED`

    Requests that wait for a load add up to far more than will ever run at a time. Bounded by the models of the
    registry, as `keep` is told."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}

    def estimate(self, model: str, inside: int, demand: Demand, now: float) -> float:
        """Requests at a time; `inside`: those that groups have. All that there are, before any has ended."""
        flow = self._flows.get(model)
        if flow is None:
            flow = self._flows[model] = _Flow(now, demand.arrived, inside + demand.waiting)
        flow.update(inside, demand, now)
        seconds = flow.seconds()
        if not seconds:
            return inside + demand.waiting
        coming = max(0.0, demand.latest - 2.0 * math.sqrt(demand.latest / LATEST_TIME)) * seconds
        return max(inside, coming) + demand.waiting * min(1.0, seconds / CLEARED)

    def keep(self, models: Collection[str]) -> None:
        for name in [name for name in self._flows if name not in models]:
            del self._flows[name]


class _Flow:
    """Requests of one model that end, and those inside, averaged alike."""

    def __init__(self, now: float, arrived: int, there: int) -> None:
        self._at = now
        self._arrived = arrived
        self._there = there
        self._ended = self._inside = 0.0  # weighted sums: what is old counts less and less

    def update(self, inside: int, demand: Demand, now: float) -> None:
        passed = max(0.0, now - self._at)
        there = inside + demand.waiting
        kept = math.exp(-passed / SERVICE_TIME)
        self._ended = self._ended * kept + (demand.arrived - self._arrived) - (there - self._there)
        self._inside = self._inside * kept + inside * passed
        self._at, self._arrived, self._there = now, demand.arrived, there

    def seconds(self) -> float:
        """Of a request in a group; 0: not known yet."""
        return self._inside / self._ended if self._ended >= ENDED_ENOUGH else 0.0

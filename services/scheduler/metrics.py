"""A scheduler's Prometheus metrics."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.breaker import STATES, State

_PREFIX = "ryzanstein_scheduler"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0, 60.0)


class SchedulerMetrics:
    """One object per service, in the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            f"{_PREFIX}_waiting", "Requests that wait for a group.", ["lane"], registry=registry
        )
        self.received = Counter(
            f"{_PREFIX}_received", "Requests pulled from intake.", ["lane"], registry=registry
        )
        self.redelivered = Counter(
            f"{_PREFIX}_redelivered", "Requests that another delivery preceded.", registry=registry
        )
        self.deferred = Counter(
            f"{_PREFIX}_deferred",
            "Deliveries put off because nobody serves the model and others need the room.",
            registry=registry,
        )
        self.lost = Counter(
            f"{_PREFIX}_lost", "Requests let go of after a silence of our own.", registry=registry
        )
        self.undecodable = Counter(
            f"{_PREFIX}_undecodable", "Intake messages that are no requests.", registry=registry
        )
        self.placements = Counter(
            f"{_PREFIX}_placements", "Groups chosen, by reason.", ["reason"], registry=registry
        )
        self.decision_seconds = Histogram(
            f"{_PREFIX}_decision_seconds",
            "From a request's turn to its dispatch: placement, session pin and batching.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            f"{_PREFIX}_queue_seconds",
            "From a request's arrival to its acceptance by a ring.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            f"{_PREFIX}_batch_size",
            "Requests per dispatch batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self.dispatched = Counter(
            f"{_PREFIX}_dispatched", "Requests accepted by groups.", ["group"], registry=registry
        )
        self.refusals = Counter(
            f"{_PREFIX}_refusals", "Requests refused by groups, by code.", ["code"], registry=registry
        )
        self.unanswered = Counter(
            f"{_PREFIX}_unanswered_batches", "Dispatch batches without an answer.", registry=registry
        )
        self.ended = Counter(
            f"{_PREFIX}_ended",
            "Generations that ended before a group took them.",
            ["code"],
            registry=registry,
        )
        self.pins = Counter(
            f"{_PREFIX}_session_pins",
            "Session pins: hit, created, moved, adopted.",
            ["what"],
            registry=registry,
        )


class BreakerCollector(Collector):
    """The state of each group's breaker, read when it is scraped: it costs no request anything."""

    def __init__(self, breakers: Callable[[], Iterable[tuple[str, State]]]) -> None:
        self._breakers = breakers

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            f"{_PREFIX}_breaker_state",
            "A group's circuit breaker: 0 closed, 1 half-open, 2 open.",
            labels=["group"],
        )
        for group, state in self._breakers():
            family.add_metric([group], STATES.index(state))
        yield family

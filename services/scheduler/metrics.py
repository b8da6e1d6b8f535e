"""A scheduler's Prometheus metrics."""

import time
from collections import Counter as Counts
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.groups import STATES, State
from services.scheduler.placement import Reason
from shared.errors import DeadlineExceeded, NoGroupAvailable, QueueFull, error_from_code
from shared.messages import LANES, Lane
from shared.service.endpoints import MODEL, Alias, Aliases, begin_at_zero

_PREFIX = "ryzanstein_scheduler"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0, 60.0)
MOST_MODELS = 100  # models that are told one by one; requests for others are told together
OTHER_MODELS = "(others)"
KEPT = 300.0  # seconds for which a group that is gone is told of


def code_label(code: str) -> str:
    """The code of an error as a label: one of `shared.errors`, whatever another service has sent."""
    return error_from_code(code, "").code


class SchedulerMetrics:
    """One object per service, in the service's own registry."""

    def __init__(
        self, registry: CollectorRegistry, breakers: Callable[[], Iterable[tuple[str, State]]] = tuple
    ) -> None:
        """`breakers`: every group's name and the state of its breaker."""
        self.groups = GroupCollector(breakers)
        registry.register(self.groups)
        counter = partial(Counter, namespace=_PREFIX, registry=registry)
        histogram = partial(Histogram, namespace=_PREFIX, registry=registry)
        self.received = counter("received", "Requests pulled from intake.", ["lane"])
        self.redelivered = counter("redelivered", "Requests that had been delivered before.")
        self.deferred = counter(
            "deferred", "Deliveries deferred because no group serves the model and other requests need the space."
        )
        self.lost = counter(
            "lost", "Requests given up because this scheduler was unresponsive for longer than ack_wait."
        )
        self.undecodable = counter("undecodable", "Intake messages that could not be decoded.")
        self.placements = counter("placements", "Placement decisions by reason.", ["reason"])
        self.decision_seconds = histogram(
            "decision_seconds",
            "From a request's turn to its dispatch: placement, session pin and batching.",
            buckets=_SECONDS,
        )
        self.queue_seconds = histogram(
            "queue_seconds", "From a request's arrival to its acceptance by a ring.", buckets=_SECONDS
        )
        self.batch_size = histogram("batch_size", "Requests per dispatch batch.", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
        self.refusals = counter("refusals", "Requests refused by groups, by code.", ["code"])
        self.unanswered = counter("unanswered_batches", "Dispatch batches that timed out.")
        self.ended = counter("ended", "Generations that ended before a group took them.", ["code"])
        self.pins = counter("session_pins", "Session pins: hit, created, moved, adopted.", ["what"])
        begin_at_zero(self.received, LANES)
        begin_at_zero(self.placements, get_args(Reason))
        begin_at_zero(self.refusals, (QueueFull.code, NoGroupAvailable.code))
        begin_at_zero(self.ended, ("cancelled", QueueFull.code, NoGroupAvailable.code, DeadlineExceeded.code))
        begin_at_zero(self.pins, ("hit", "created", "moved", "adopted"))


class WaitingCollector(Collector):
    """How many requests wait, by model and lane, read when it is scraped: it costs no request anything."""

    def __init__(self, waiting: Callable[[], Mapping[tuple[str, Lane], int]], served: Callable[[], Iterable[str]]):
        """`served`: models that have groups, whatever their state."""
        self._waiting = waiting
        self._served = served
        # Models that have been waited for or served: a queue that is empty again is told as 0, not left out.
        self._known: dict[str, None] = {}

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(f"{_PREFIX}_waiting", "Requests that wait for a group.", labels=["model", "lane"])
        waiting = Counts(self._waiting())
        for model in (*self._served(), *(model for model, _ in waiting)):
            if len(self._known) < MOST_MODELS:
                self._known[model] = None
        for model in self._known:
            for lane in LANES:
                family.add_metric([model, lane], waiting.pop((model, lane), 0))
        for lane in LANES if waiting else ():
            others = sum(count for (_, of), count in waiting.items() if of == lane)
            family.add_metric([OTHER_MODELS, lane], others)
        yield family


def vllm_aliases(waiting: WaitingCollector) -> Aliases:
    """What waits here is not in any engine's queue yet: the sum over schedulers and executors is what waits."""
    return Aliases([Alias("vllm:num_requests_waiting", waiting, f"{_PREFIX}_waiting", MODEL)])


class GroupCollector(Collector):
    """What is told of each group: its breaker's state, and requests that it has taken.

    A group that is gone is shown for `KEPT` seconds more, so that a scrape sees its last figures.
    """

    def __init__(
        self, breakers: Callable[[], Iterable[tuple[str, State]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._breakers = breakers
        self._clock = clock
        self._dispatched: dict[str, int] = {}
        self._gone: dict[str, float] = {}  # since when groups with a count have been gone

    def dispatched(self, group: str) -> None:
        """It has accepted a request."""
        self._dispatched[group] = self._dispatched.get(group, 0) + 1

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            f"{_PREFIX}_breaker_state", "A group's circuit breaker: 0 closed, 1 half-open, 2 open.", labels=["group"]
        )
        known = dict(self._breakers())
        for group, state in known.items():
            states.add_metric([group], STATES.index(state))
        yield states
        self._forget(known)
        dispatched = CounterMetricFamily(f"{_PREFIX}_dispatched", "Requests accepted by groups.", labels=["group"])
        for group, count in self._dispatched.items():
            dispatched.add_metric([group], count)
        yield dispatched

    def _forget(self, known: Container[str]) -> None:
        now = self._clock()
        for group in list(self._dispatched):
            if group in known:
                self._gone.pop(group, None)
            elif now - self._gone.setdefault(group, now) >= KEPT:
                del self._dispatched[group], self._gone[group]

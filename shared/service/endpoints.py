"""The /health, /ready and /metrics that every service answers, and what its metrics are made of beside
prometheus_client's own types.

QuickHistograms   for what is observed per token: an observation costs a fifth of prometheus_client's
Aliases           the same figures once more, under names that others' dashboards and autoscalers ask for
"""

import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import msgspec
from prometheus_client import Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from shared import tracing

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def new_registry() -> CollectorRegistry:
    """A registry of a service's own metrics, with the process's CPU, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class SpanCollector(Collector):
    """Spans of this process, by what has become of them; registered where tracing is on."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("ryzanstein_tracing_spans", "Spans by outcome.", labels=["outcome"])
        for outcome, count in tracing.statistics()._asdict().items():
            family.add_metric([outcome], count)
        yield family


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """What /health and /ready answer."""

    service: str
    instance: str
    state: str
    ready: bool
    reason: str = ""


class StateCollector(Collector):
    """What /ready says, and whether the broker is there, read when they are scraped: Prometheus sees no /ready."""

    def __init__(
        self, health: Callable[[], Health], connected: Callable[[], bool], reconnects: Callable[[], int]
    ) -> None:
        self._health = health
        self._connected = connected
        self._reconnects = reconnects

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "ryzanstein_service_ready", "1 while the service is ready, as /ready answers.", self._health().ready
        )
        yield GaugeMetricFamily(
            "ryzanstein_nats_connected", "1 while the service is connected to NATS.", self._connected()
        )
        yield CounterMetricFamily("ryzanstein_nats_reconnects", "Reconnections to NATS.", self._reconnects())


# OpenAI's error object, as the gateway's other answers have it.
_NOT_ALLOWED = msgspec.json.encode(
    {
        "error": {
            "message": "Only GET and HEAD are allowed here.",
            "type": "invalid_request_error",
            "param": None,
            "code": "method_not_allowed",
        }
    }
)


EXPOSITION_SECONDS = 1.0  # how long the text of /metrics is answered before it is made anew


class Exposition:
    """The text of a registry's metrics. It takes milliseconds of the event loop, and whoever reaches the port may ask
    for it as often as he likes."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._registry = registry
        self._clock = clock
        self._text = b""
        self._made = -math.inf

    def text(self) -> bytes:
        now = self._clock()
        if now - self._made >= EXPOSITION_SECONDS:
            self._text, self._made = generate_latest(self._registry), now
        return self._text


class OpsApp:
    """ASGI application for /health, /ready and /metrics.

    /health is 200 while the process turns its event loop; /ready is 200 when it can do its work,
    else 503 with the reason. /metrics is at most a second old.
    """

    paths = ("/health", "/ready", "/metrics")

    def __init__(self, health: Callable[[], Health], registry: CollectorRegistry) -> None:
        self._health = health
        self._exposition = Exposition(registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = self._answer(scope["path"], scope["method"])
        allow = [(b"allow", b"GET, HEAD")] if status == 405 else []
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type.encode()),
                    (b"content-length", str(len(body)).encode()),
                    *allow,
                ],
            }
        )
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, path: str, method: str) -> tuple[int, str, bytes]:
        if path not in self.paths:
            return 404, "text/plain", b"not found; this port has /health, /ready and /metrics\n"
        if method not in ("GET", "HEAD"):
            return 405, "application/json", _NOT_ALLOWED
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, self._exposition.text()
        health = self._health()
        status = 200 if path == "/health" or health.ready else 503
        return status, "application/json", msgspec.json.encode(health)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of all series, which nobody asks for

# Bounds of what takes as long as a request, in seconds.
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class QuickHistogram:
    """One histogram. Observed and read in one thread, so it needs no lock."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def buckets(self) -> list[tuple[str, float]]:
        return cumulative(self._bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus' buckets: how many values were at most as large as each bound. `counts`: how many fell between
    two bounds, and at last beyond them all."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    total, found = 0, []
    for name, count in zip(names, counts, strict=True):
        total += count
        found.append((name, float(total)))
    return found


class QuickHistograms(Collector):
    """A family of them. The values of its labels must be few: nothing is ever dropped."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = bounds
        self._children: dict[tuple[str, ...], QuickHistogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> QuickHistogram:
        """The histogram with these values of the labels, in their order; made when it is not there."""
        known = self._children.get(values)
        if known is None:
            known = self._children[values] = QuickHistogram(self._bounds)
        return known

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, histogram in self._children.items():
            family.add_metric(values, histogram.buckets, histogram.sum)
        yield family


def begin_at_zero(counter: Counter, values: Iterable[str]) -> None:
    """Shows these values of the counter's one label before they have happened: a rate over a counter that appears
    with its first event misses that event."""
    for value in values:
        counter.labels(value)


class Alias(NamedTuple):
    """A metric under another name. Counters are named without `_total`."""

    name: str
    source: Collector
    family: str  # which of the source's families
    labels: Mapping[str, str]  # names of labels, ours to theirs; the others stay as they are


MODEL = {"model": "model_name"}  # what others call the model


class Aliases(Collector):
    """The samples of other metrics, renamed when they are scraped: they cost nothing at any other time."""

    def __init__(self, aliases: Iterable[Alias]) -> None:
        self.aliases = list(aliases)

    def collect(self) -> Iterable[Metric]:
        read: dict[Collector, dict[str, Metric]] = {}
        for alias in self.aliases:
            if alias.source not in read:
                read[alias.source] = {metric.name: metric for metric in alias.source.collect()}
            metric = read[alias.source].get(alias.family)
            if metric is not None:
                yield _renamed(metric, alias)


def _renamed(metric: Metric, alias: Alias) -> Metric:
    renamed = Metric(alias.name, f"The same as {metric.name}: {metric.documentation}", metric.type)
    for sample in metric.samples:
        labels = {alias.labels.get(name, name): value for name, value in sample.labels.items()}
        name = alias.name + sample.name.removeprefix(metric.name)
        renamed.samples.append(Sample(name, labels, sample.value))
    return renamed

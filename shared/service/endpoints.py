"""The /health, /ready and /metrics that every service answers."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

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

    def __init__(self, health: Callable[[], Health], connected: Callable[[], bool]) -> None:
        self._health = health
        self._connected = connected

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "ryzanstein_service_ready",
            "1 while the service is ready, as /ready answers.",
            self._health().ready,
        )
        yield GaugeMetricFamily(
            "ryzanstein_nats_connected", "1 while the service is connected to NATS.", self._connected()
        )


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
"""OpenAI's error object, as the gateway's other answers have it."""


class OpsApp:
    """ASGI application for /health, /ready and /metrics.

    /health is 200 while the process turns its event loop; /ready is 200 when it can do its work,
    else 503 with the reason.
    """

    paths = ("/health", "/ready", "/metrics")

    def __init__(self, health: Callable[[], Health], registry: CollectorRegistry) -> None:
        self._health = health
        self._registry = registry

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
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        health = self._health()
        status = 200 if path == "/health" or health.ready else 503
        return status, "application/json", msgspec.json.encode(health)

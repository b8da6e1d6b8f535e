"""Structured logs, and the /health, /ready and /metrics that every service answers."""

import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from structlog.typing import Processor

from shared import tracing
from shared.keys import redact

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def configure_logging(service: str, instance: str, *, level: str, fmt: str) -> None:
    """One line per event on standard error, with service, instance and the request id where there is one."""
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    renderer: Processor = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer, _without_keys],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def _without_keys(logger: object, name: str, line: Any) -> Any:
    """No API key gets into a log, whatever a client wrote it into: a path, a model's name, an id."""
    return redact(line) if isinstance(line, str) else line


def new_registry() -> CollectorRegistry:
    """A registry of a service's own metrics, with the process's CPU, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class SpanCollector(Collector):
    """Spans of this process, by what has become of them; registered where tracing is on."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "ryzanstein_tracing_spans", "Spans, by what has become of them.", labels=["outcome"]
        )
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
            return 405, "text/plain", b"only GET and HEAD are allowed here\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        health = self._health()
        status = 200 if path == "/health" or health.ready else 503
        return status, "application/json", msgspec.json.encode(health)

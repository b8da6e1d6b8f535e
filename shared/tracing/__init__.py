"""Traces: what one request spends its time on, from the client's header to the ranks. A thin façade.

    client ─traceparent─▶ gateway ─GenerationRequest.traceparent─▶ scheduler ─▶ leader ─StepPlan.traced─▶ ranks
                             │                                        │           │◀─── times (shared memory)
                             └───────────── spans, OTLP over HTTP ────┴───────────┘

Off unless OpenTelemetry's own variables turn it on (`configure`); then `otlp.py`, the only module that imports
OpenTelemetry, is loaded. Whoever traces asks here alone, and gets `NONE`, which records nothing, where tracing is
off or the request is not sampled: what is not recorded is not passed on either, so nothing below asks again.
"""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType

import structlog

from shared.tracing.spans import (
    NONE,
    Attributes,
    Kind,
    Recorder,
    Span,
    Statistics,
    TraceContext,
    Value,
    from_headers,
    parse,
)

__all__ = [
    "NONE",
    "Attributes",
    "Kind",
    "Recorder",
    "Span",
    "Statistics",
    "TraceContext",
    "Value",
    "active",
    "begin",
    "close",
    "configure",
    "current",
    "edge",
    "follow",
    "from_headers",
    "ids_of",
    "ns_at",
    "on",
    "parse",
    "stage",
    "statistics",
    "under",
]


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CLOSE_TIMEOUT = 3.0
"""Seconds that a process which ends gives the collector to take what is left."""

log = structlog.get_logger(__name__)
_current: ContextVar[Span] = ContextVar("current_span", default=NONE)
_edge: ContextVar[Span] = ContextVar("edge_span", default=NONE)


class _State:
    recorder: Recorder | None = None


def on() -> bool:
    """Whether this process records spans at all."""
    return _State.recorder is not None


def wanted(environment: Mapping[str, str] = os.environ) -> str:
    """The variable that turns tracing on; empty: none does."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("otlp", ""):
        return ""
    return next((name for name in ENDPOINTS if environment.get(name, "").strip()), "")


def configure(service: str, instance: str, attributes: Attributes | None = None) -> bool:
    """Turns tracing on where the environment says so; returns whether it is on. What prevents it is one line in the
    log: nothing fails because it cannot be traced. `attributes`: of the resource, beside service and instance."""
    variable = wanted()
    if not variable:
        return False
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning(
            "other_trace_protocol", reason=f"spans go over http/protobuf, not {protocol}; port 4318 is usual"
        )
    try:
        otlp = importlib.import_module("shared.tracing.otlp")
        _State.recorder = otlp.OtlpRecorder(service, instance, attributes or {})
    except ImportError as error:
        reason = (
            f"{variable} is set, but {error.name or 'OpenTelemetry'} is not installed, so nothing is traced; "
            "install ryzanstein[tracing], or unset the variable."
        )
        log.warning("not_tracing", reason=reason)
        return False
    except Exception as error:
        reason = (
            f"OpenTelemetry refuses its settings ({error}), so nothing is traced; see the OTEL_ variables."
        )
        log.warning("not_tracing", reason=reason)
        return False
    return True


def close(timeout: float = CLOSE_TIMEOUT) -> None:
    """Sends what there is, for `timeout` seconds at most, and records nothing more."""
    recorder, _State.recorder = _State.recorder, None
    if recorder is None:
        return
    recorder.close(timeout)
    if lost := recorder.statistics().failed + recorder.statistics().dropped:
        log.warning("spans_lost", spans=lost)


def statistics() -> Statistics:
    """What has become of the spans so far."""
    return _State.recorder.statistics() if _State.recorder is not None else Statistics()


# --- spans ---------------------------------------------------------------------------------------


def begin(
    name: str,
    remote: TraceContext | None = None,
    *,
    kind: Kind = "server",
    attributes: Attributes | None = None,
    links: Sequence[TraceContext] = (),
    at: int = 0,
) -> Span:
    """A span at an edge: it continues the trace of `remote`, or begins one. The sampler decides."""
    recorder = _State.recorder
    return NONE if recorder is None else recorder.start(name, remote, kind, attributes, links, at)


def under(
    parent: Span,
    name: str,
    *,
    kind: Kind = "internal",
    attributes: Attributes | None = None,
    links: Sequence[TraceContext] = (),
    at: int = 0,
) -> Span:
    """A span within `parent`: recorded if that is."""
    recorder, context = _State.recorder, parent.context
    if recorder is None or context is None:
        return NONE
    return recorder.start(name, context, kind, attributes, links, at)


def follow(
    traceparent: str,
    tracestate: str,
    name: str,
    *,
    kind: Kind,
    attributes: Attributes | None = None,
    links: Sequence[TraceContext] = (),
    at: int = 0,
) -> Span:
    """A span for a message of our own: recorded if the span that it came from is."""
    if _State.recorder is None or not traceparent:
        return NONE
    context = parse(traceparent, tracestate)
    if context is None or not context.sampled:
        return NONE
    return _State.recorder.start(name, context, kind, attributes, links, at)


# --- the span that is active -----------------------------------------------------------------------


def current() -> Span:
    """The span within which this task works."""
    return _current.get()


def edge() -> Span:
    """The span of the request that this task works for, whatever stage it is in."""
    return _edge.get()


def ids_of(span: Span) -> dict[str, str]:
    """What log lines about `span` carry; nothing where it is not recorded."""
    context = span.context
    return {} if context is None else {"trace_id": context.trace_id, "span_id": context.span_id}


class active:  # noqa: N801  # a context manager, as those of contextlib
    """Within the block `span` is the current one, and log lines carry its ids. The span goes on behind it."""

    __slots__ = ("_before", "_bound", "_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._token: Token[Span] | None = None
        if self._span.recording:
            self._token = _current.set(self._span)
            self._enter()
            self._bound = structlog.contextvars.bind_contextvars(**ids_of(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            structlog.contextvars.reset_contextvars(**self._bound)
            _current.reset(self._token)
            self._leave()

    def _enter(self) -> None:
        self._before = _edge.set(self._span)

    def _leave(self) -> None:
        _edge.reset(self._before)


def stage(name: str) -> "Span | _Stage":
    """A block that is a part of what the current span is about, as a span of its own; nothing where that is not
    recorded."""
    parent = _current.get()
    return NONE if parent is NONE else _Stage(under(parent, name))


class _Stage(active):
    """The span ends with the block, and remains below the request's (`edge`)."""

    __slots__ = ()

    def _enter(self) -> None:
        return

    def _leave(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._token is not None:
            self._span.__exit__(kind, error, trace)


def ns_at(perf_counter: float) -> int:
    """The unix nanoseconds of a moment on `time.perf_counter`'s clock."""
    return time.time_ns() - round((time.perf_counter() - perf_counter) * 1e9)

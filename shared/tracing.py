"""Traces: what one request spends its time on, from the client's header to the ranks.

    client ─traceparent─▶ gateway ─GenerationRequest.traceparent─▶ scheduler ─▶ leader ─StepPlan.traced─▶ ranks
                             │                                        │           │◀─── times (shared memory)
                             └───────────── spans, OTLP over HTTP ────┴───────────┘

Off unless OpenTelemetry's own variables turn it on (`configure`); then `otlp.py`, the only module that imports
OpenTelemetry, is loaded. Whoever traces asks here alone, and gets `NONE`, which records nothing, where tracing is
off or the request is not sampled: what is not recorded is not passed on either, so nothing below asks again.

W3C Trace Context (`traceparent`, `tracestate`) is read and written here. What is malformed is as if it had not been
sent, never an error (section 3.2.2.3: the vendor starts a new trace).

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version        trace id                 span id     flags (1: sampled)
"""

import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import structlog

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_STATE_BYTES, _STATE_MEMBERS = 512, 32
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A span, as whoever continues its trace knows it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = _SAMPLED
    state: str = ""  # `tracestate`: what other vendors' systems have to say, passed on

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags & 0xFF:02x}"


def parse(traceparent: object, tracestate: object = "") -> TraceContext | None:
    """None for what is no `traceparent`. A `tracestate` that is none is left out."""
    if not isinstance(traceparent, str):
        return None
    match = _PARENT.fullmatch(traceparent.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16), _state(tracestate))


def from_headers(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Of a request's headers, names in lower case. Two `traceparent` are none; several `tracestate` are one list."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.decode("latin-1"))
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    return parse(parents[0], ",".join(states)) if len(parents) == 1 else None


def _state(given: object) -> str:
    """The whole list, or nothing: one wrong member, or one twice, makes it none."""
    if not isinstance(given, str) or len(given) > _STATE_BYTES:
        return ""
    members = [member.strip(" \t") for member in given.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > _STATE_MEMBERS or len(keys) != len(members):
        return ""
    return ",".join(members) if all(_MEMBER.fullmatch(member) for member in members) else ""


Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client", "producer", "consumer"]


class Span:
    """Records nothing. Times are unix nanoseconds, 0: now. As a context manager it ends with the block, and fails
    with what that raises."""

    __slots__ = ()

    @property
    def context(self) -> TraceContext | None:
        """What continues the trace from here; None: there is nothing to continue."""
        return None

    @property
    def recording(self) -> bool:
        return self.context is not None

    @property
    def traceparent(self) -> str:
        """Of `context`; empty without one."""
        context = self.context
        return "" if context is None else context.traceparent

    @property
    def tracestate(self) -> str:
        context = self.context
        return "" if context is None else context.state

    def set(self, attributes: Attributes) -> None:
        return

    def rename(self, name: str) -> None:
        """Its name, where that is known at its end alone."""
        return

    def event(self, name: str, attributes: Attributes | None = None, *, at: int = 0) -> None:
        return

    def fail(self, kind: str) -> None:
        """It has failed. `kind`: a code or a class's name, never a message, which may quote what a client wrote."""
        return

    def end(self, *, at: int = 0) -> None:
        """Twice is safe: the first counts."""
        return

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


NONE = Span()


class Statistics(NamedTuple):
    """What has become of the spans of this process."""

    exported: int = 0
    failed: int = 0  # the collector has not taken them in time
    dropped: int = 0  # there was no room for them in the queue


class SpanRecorder(Protocol):
    """What records spans: OpenTelemetry."""

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        kind: Kind,
        attributes: Attributes | None,
        links: Sequence[TraceContext],
        at: int,
    ) -> Span:
        """A span; `NONE` where the sampler wants none."""
        ...

    def statistics(self) -> Statistics: ...

    def close(self, timeout: float) -> None:
        """Sends what there is, for up to `timeout` seconds."""
        ...


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CLOSE_TIMEOUT = 3.0  # seconds that a process which ends gives the collector to take what is left

log = structlog.get_logger(__name__)
_current: ContextVar[Span] = ContextVar("current_span", default=NONE)
_edge: ContextVar[Span] = ContextVar("edge_span", default=NONE)


class _State:
    recorder: SpanRecorder | None = None


def on() -> bool:
    """Whether this process records spans at all."""
    return _State.recorder is not None


def enabling_variable(environment: Mapping[str, str] = os.environ) -> str:
    """The variable that turns tracing on; empty: none does."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("otlp", ""):
        return ""
    return next((name for name in ENDPOINTS if environment.get(name, "").strip()), "")


def configure(service: str, instance: str, attributes: Attributes | None = None) -> bool:
    """Turns tracing on where the environment says so; returns whether it is on. What prevents it is one line in the
    log: nothing fails because it cannot be traced. `attributes`: of the resource, beside service and instance."""
    variable = enabling_variable()
    if not variable:
        return False
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning(
            "otlp_protocol_unsupported", reason=f"spans go over http/protobuf, not {protocol}; port 4318 is usual"
        )
    try:
        otlp = importlib.import_module("shared.otlp")
        _State.recorder = otlp.OtlpRecorder(service, instance, attributes or {})
    except ImportError as error:
        reason = (
            f"{variable} is set, but {error.name or 'OpenTelemetry'} is not installed, so nothing is traced; "
            "install ryzanstein[tracing], or unset the variable."
        )
        log.warning("tracing_disabled", reason=reason)
        return False
    except Exception as error:
        reason = f"OpenTelemetry refuses its settings ({error}), so nothing is traced; see the OTEL_ variables."
        log.warning("tracing_disabled", reason=reason)
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
) -> Span:
    """A span at an edge: it continues the trace of `remote`, or begins one. The sampler decides."""
    recorder = _State.recorder
    return NONE if recorder is None else recorder.start(name, remote, kind, attributes, links, 0)


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
) -> Span:
    """A span for a message of our own: recorded if the span that it came from is."""
    if _State.recorder is None or not traceparent:
        return NONE
    context = parse(traceparent, tracestate)
    if context is None or not context.sampled:
        return NONE
    return _State.recorder.start(name, context, kind, attributes, links, 0)


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
    """Within the block `span` is the current one, and log lines carry its ids. The span goes on behind it; one that is
    a `stage` ends with the block, and remains below the request's (`edge`)."""

    __slots__ = ("_before", "_bound", "_span", "_stage", "_token")

    def __init__(self, span: Span, *, stage: bool = False) -> None:
        self._span = span
        self._stage = stage

    def __enter__(self) -> Span:
        self._token: Token[Span] | None = None
        if self._span.recording:
            self._token = _current.set(self._span)
            self._before = None if self._stage else _edge.set(self._span)
            self._bound = structlog.contextvars.bind_contextvars(**ids_of(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            structlog.contextvars.reset_contextvars(**self._bound)
            _current.reset(self._token)
            if self._before is not None:
                _edge.reset(self._before)
            else:
                self._span.__exit__(kind, error, trace)


def stage(name: str) -> Span | active:
    """A block that is a part of what the current span is about, as a span of its own; nothing where that is not
    recorded."""
    parent = _current.get()
    return NONE if parent is NONE else active(under(parent, name), stage=True)

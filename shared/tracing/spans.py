"""What a span is to whoever records one; `NONE`, which records nothing; what a recorder must do; and W3C Trace
Context (`traceparent`, `tracestate`), read and written. Pure.

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version        trace id                 span id     flags (1: sampled)

What is malformed is as if it had not been sent, never an error (section 3.2.2.3: the vendor starts a new trace).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_STATE_BYTES, _STATE_MEMBERS = 512, 32
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A span, as whoever continues its trace knows it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16."""
    flags: int = _SAMPLED
    state: str = ""
    """`tracestate`: what other vendors' systems have to say, passed on."""

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

    def link(self, context: TraceContext) -> None:
        """It has to do with that span, of this trace or another."""
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
    failed: int = 0
    """The collector has not taken them in time."""
    dropped: int = 0
    """There was no room for them in the queue."""


class Recorder(Protocol):
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

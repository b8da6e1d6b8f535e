"""What a span is to whoever records one; `NONE`, which records nothing; and what a recorder must do."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

from shared.tracing.context import TraceContext

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

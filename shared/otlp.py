"""The recorder: OpenTelemetry's SDK, which samples, batches and sends spans over OTLP/HTTP.

    span ended ──▶ queue (bounded) ──thread──▶ collector
                     │ full: dropped, counted    │ away or slow: tried again by the exporter, then lost, counted

The only room that imports OpenTelemetry; loaded where tracing is on. All of its variables (`OTEL_*`) hold.
"""

import os
import threading
from collections.abc import Sequence
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from shared.tracing import NONE, Attributes, Kind, Span, Statistics, TraceContext

SCOPE = "ryzanstein"
QUEUE_SIZE = 2048  # spans that wait to be sent; OTEL_BSP_MAX_QUEUE_SIZE
# Milliseconds that a span waits for others; OTEL_BSP_SCHEDULE_DELAY. Short: what a process that is killed has not
# sent is lost.
SCHEDULE_DELAY = 1000

_KINDS: dict[Kind, trace.SpanKind] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}


class _RecordedSpan(Span):
    __slots__ = ("_context", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        found = span.get_span_context()
        self._context = TraceContext(
            trace.format_trace_id(found.trace_id),
            trace.format_span_id(found.span_id),
            int(found.trace_flags),
            found.trace_state.to_header(),
        )

    @property
    def context(self) -> TraceContext:
        return self._context

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, attributes: Attributes | None = None, *, at: int = 0) -> None:
        self._span.add_event(name, attributes, at or None)

    def fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(trace.StatusCode.ERROR)

    def end(self, *, at: int = 0) -> None:
        if self._span.is_recording():
            self._span.end(at or None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(getattr(error, "code", "") or type(error).__name__)
        self.end()


class _Counts:
    """Written by the exporter's thread and by those that end spans."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting = self.sending = self.exported = self.failed = self.dropped = 0


class _CountedExporter(SpanExporter):
    """What leaves the queue, and whether the collector has taken it."""

    def __init__(self, inner: SpanExporter, counts: _Counts) -> None:
        self._inner = inner
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        counts, size = self._counts, len(spans)
        with counts.lock:
            counts.waiting -= size
            counts.sending = size
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
            return result
        finally:
            with counts.lock:
                if result is SpanExportResult.SUCCESS:
                    counts.exported += counts.sending
                else:
                    counts.failed += counts.sending
                counts.sending = 0

    def shutdown(self) -> None:
        self._inner.shutdown()


class _CountedProcessor(BatchSpanProcessor):
    """OpenTelemetry's queue, which drops the oldest span where it is full: counted here."""

    def __init__(self, exporter: SpanExporter, counts: _Counts, size: int) -> None:
        super().__init__(
            exporter,
            max_queue_size=size,
            schedule_delay_millis=_number("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_DELAY),
            max_export_batch_size=min(size, _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        )
        self._counts = counts
        self._size = size

    def on_end(self, span: ReadableSpan) -> None:
        with self._counts.lock:
            if self._counts.waiting >= self._size:
                self._counts.dropped += 1
            else:
                self._counts.waiting += 1
        super().on_end(span)


class OtlpRecorder:
    """`Recorder` by OpenTelemetry. Raises what its SDK raises of wrong settings."""

    def __init__(self, service: str, instance: str, attributes: Attributes) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"ryzanstein-{service}"}
        resource = Resource.create(
            {"service.namespace": "ryzanstein", "service.instance.id": instance, **named, **attributes}
        )
        self._counts = _Counts()
        self._exporter = _CountedExporter(OTLPSpanExporter(), self._counts)
        self._processor = _CountedProcessor(
            self._exporter, self._counts, _number("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SIZE)
        )
        # The sampler is OTEL_TRACES_SAMPLER's: by default the parent's decision, and every trace without one.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(SCOPE)

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        kind: Kind,
        attributes: Attributes | None,
        links: Sequence[TraceContext],
        at: int,
    ) -> Span:
        context = trace.set_span_in_context(_remote(parent)) if parent else Context()
        span = self._tracer.start_span(
            name,
            context,
            _KINDS[kind],
            attributes,
            [trace.Link(_remote(link).get_span_context()) for link in links],
            at or None,
        )
        return _RecordedSpan(span) if span.get_span_context().trace_flags.sampled else NONE

    def statistics(self) -> Statistics:
        with self._counts.lock:
            return Statistics(self._counts.exported, self._counts.failed, self._counts.dropped)

    def close(self, timeout: float) -> None:
        """A thread of its own waits for the collector: OpenTelemetry would for half a minute."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout)
        if closing.is_alive():
            self._exporter.shutdown()  # ends its pauses between tries
            with self._counts.lock:
                self._counts.failed += self._counts.waiting + self._counts.sending
                self._counts.waiting = self._counts.sending = 0


def _remote(context: TraceContext) -> trace.Span:
    state = trace.TraceState.from_header([context.state]) if context.state else None
    return trace.NonRecordingSpan(
        trace.SpanContext(
            int(context.trace_id, 16),
            int(context.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(context.flags),
            trace_state=state,
        )
    )


def _number(variable: str, usual: int) -> int:
    """Raises `ValueError` for what is no number above 0."""
    value = int(os.environ.get(variable) or usual)
    if value <= 0:
        raise ValueError(f"{variable} is {value} and must be above 0")
    return value

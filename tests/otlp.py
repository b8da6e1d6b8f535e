"""A collector for tests: takes OTLP over HTTP, keeps the spans, and can be slow."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class ReceivedSpan(NamedTuple):
    """A span, as it came over the wire. Times are unix nanoseconds."""

    service: str
    resource: dict[str, Any]
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[str]
    links: list[tuple[str, str]]
    begin: int
    end: int
    failed: bool
    state: str


def decoded(body: bytes) -> list[ReceivedSpan]:
    """The spans of an ExportTraceServiceRequest."""
    found = []
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {item.key: _plain(item.value) for item in part.resource.attributes}
        found += [_received(resource, span) for scope in part.scope_spans for span in scope.spans]
    return found


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _received(resource: dict[str, Any], span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        resource=resource,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes={item.key: _plain(item.value) for item in span.attributes},
        events=[event.name for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
        state=span.trace_state,
    )


def serve(port: int, take: Callable[[list[ReceivedSpan]], None]) -> ThreadingHTTPServer:
    """A server on loopback that gives `take` the spans of each request; not running yet."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            take(decoded(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


class Collector:
    """Use `collector()`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.answering = threading.Event()  # cleared: whoever sends waits
        self.answering.set()
        self._news = threading.Condition()
        self.url = ""

    def take(self, spans: list[ReceivedSpan]) -> None:
        self.answering.wait(60)
        with self._news:
            self.spans += spans
            self._news.notify_all()

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool], timeout: float = 60) -> None:
        """Until the spans so far fulfil `condition`; to be called in a thread."""
        with self._news:
            assert self._news.wait_for(lambda: condition(self.spans), timeout), self.shown()

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def shown(self) -> str:
        return "\n".join(f"{s.trace_id[:6]} {s.service} {s.name} {s.attributes}" for s in self.spans)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A running one."""
    found = Collector()
    server = serve(0, found.take)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.answering.set()
        server.shutdown()
        server.server_close()
        thread.join()

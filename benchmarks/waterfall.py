"""A collector for one's own machine: takes spans over OTLP/HTTP and prints each trace as a waterfall of text.

    python -m benchmarks.waterfall --slower-than 1
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 ryzanstein up

A trace is printed when the span that began it is here and nothing more has come for two seconds.
"""

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

QUIET = 2.0
"""Seconds after which a trace is taken for whole."""
FORGOTTEN = 600.0
"""Seconds after which it is printed without its beginning: its gateway was killed."""
SERVER = 2
"""OTLP's number of the kind."""
NAME, WHERE, BAR = 38, 12, 40
"""Characters of a row."""
SHOWN = (
    "http.response.status_code",
    "ryzanstein.attempt",
    "ryzanstein.placement",
    "ryzanstein.prompt_tokens",
    "ryzanstein.cached_tokens",
    "ryzanstein.chunks",
    "ryzanstein.steps",
    "ryzanstein.longest_step_seconds",
    "ryzanstein.batch_size.mean",
    "ryzanstein.communication_seconds",
    "gen_ai.usage.output_tokens",
    "error.type",
)
"""Attributes that a row shows."""


class Received(NamedTuple):
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


def decoded(body: bytes) -> list[Received]:
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


def _received(resource: dict[str, Any], span: Any) -> Received:
    return Received(
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


# --- as text -------------------------------------------------------------------------------------


def waterfall(spans: Iterable[Received]) -> str:
    """One trace: a row for each span below its parent, in the order of their beginnings. A span whose parent is not
    here, such as that of a process that was killed, stands at the left."""
    ordered = sorted(spans, key=lambda span: (span.begin, span.end))
    first, last = ordered[0].begin, max(span.end for span in ordered)
    known = {span.span_id for span in ordered}
    children: dict[str, list[Received]] = defaultdict(list)
    for span in ordered:
        children[span.parent_id if span.parent_id in known else ""].append(span)
    rows = [f"trace {ordered[0].trace_id}: {(last - first) / 1e6:,.0f} ms"]

    def add(parent: str, depth: int) -> None:
        for span in children[parent]:
            rows.append(_row(span, depth, first, max(1, last - first)))
            add(span.span_id, depth + 1)

    add("", 0)
    return "\n".join(rows)


def _row(span: Received, depth: int, first: int, whole: int) -> str:
    begin = round((span.begin - first) / whole * BAR)
    width = max(1, round((span.end - span.begin) / whole * BAR))
    bar = f"{' ' * min(begin, BAR - 1)}{('x' if span.failed else '=') * min(width, BAR)}"[:BAR]
    shown = {_short(name): span.attributes[name] for name in SHOWN if name in span.attributes}
    about = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in shown.items()
    )
    name = f"{'  ' * depth}{span.name}"[:NAME]
    where = str(span.resource.get("service.instance.id", span.service))[:WHERE]
    times = f"{(span.begin - first) / 1e6:8,.1f} {(span.end - span.begin) / 1e6:9,.1f}"
    return f"{name:{NAME}} {where:{WHERE}} |{bar:{BAR}}| {times}  {about}".rstrip()


def _short(attribute: str) -> str:
    return attribute.removeprefix("ryzanstein.").removeprefix("gen_ai.usage.").removeprefix("http.response.")


# --- the collector -------------------------------------------------------------------------------


def serve(port: int, take: Callable[[list[Received]], None]) -> ThreadingHTTPServer:
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


def _begun(spans: list[Received]) -> bool:
    """Whether the span is here that nobody of ours has caused: it ends last, and so comes last."""
    known = {span.span_id for span in spans}
    return any(not span.parent_id or (span.kind == SERVER and span.parent_id not in known) for span in spans)


class Traces:
    """Spans by trace, until they are printed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, list[Received]] = {}
        self._heard: dict[str, float] = {}

    def take(self, spans: list[Received]) -> None:
        with self._lock:
            for span in spans:
                self._spans.setdefault(span.trace_id, []).append(span)
                self._heard[span.trace_id] = time.monotonic()

    def whole(self, quiet: float) -> list[list[Received]]:
        """Those that have their beginning, and of which nothing has come for `quiet` seconds; once."""
        with self._lock:
            now = time.monotonic()
            silent = [name for name, heard in self._heard.items() if now - heard >= quiet]
            done = [
                name for name in silent if _begun(self._spans[name]) or now - self._heard[name] >= FORGOTTEN
            ]
            for name in done:
                del self._heard[name]
            return [self._spans.pop(name) for name in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--slower-than", type=float, default=0.0, help="seconds; faster ones are not printed")
    options = parser.parse_args()
    traces = Traces()
    server = serve(options.port, traces.take)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"Spans are taken on http://127.0.0.1:{server.server_address[1]}", flush=True)
    while True:
        time.sleep(0.2)
        for spans in traces.whole(QUIET):
            seconds = (max(span.end for span in spans) - min(span.begin for span in spans)) / 1e9
            if seconds >= options.slower_than:
                print(f"\n{waterfall(spans)}", flush=True)


if __name__ == "__main__":
    main()

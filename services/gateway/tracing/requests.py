"""Spans of HTTP requests, of generations on a WebSocket, and of lines of batches (OpenTelemetry's conventions).

A line of a batch has a trace of its own, linked to the span that created the batch: a trace with a million lines could
neither be stored nor read; and whether a line is traced is the sampler's to say for each, as for a request.
"""

from typing import Any

from shared import tracing
from shared.keys import redact
from shared.messages.batches import BatchJob
from shared.service.endpoints import Scope
from shared.tracing import Attributes, Span, TraceContext, Value

SERVER_ERROR = 500


def begin_request(scope: Scope) -> Span:
    """Of an HTTP request, continuing the trace that its headers name. Its answer names it (`traceresponse`)."""
    state = scope.setdefault("state", {})
    span = tracing.begin(str(scope["method"]), tracing.from_headers(scope["headers"]), attributes=_attributes(scope))
    if span.recording:
        state.setdefault("answer_headers", {})["traceresponse"] = span.traceparent
    return span


def end_request(span: Span, scope: Scope, status: int, route: str) -> None:
    """`status`: of the answer, 0 where there is none; `route`: one of few."""
    if not span.recording:
        return
    state = scope["state"]
    found: dict[str, Value] = {
        "http.route": route,
        "http.response.status_code": status,
        "ryzanstein.request_id": state.get("request_id", ""),
    }
    if model := state.get("model", ""):
        found["gen_ai.request.model"] = model
    span.set(found)
    span.rename(f"{scope['method']} {route}")
    if not status or status >= SERVER_ERROR:
        span.fail(str(status or "no_answer"))
    span.end()


def handshake_context(scope: Scope) -> TraceContext | None:
    """What a WebSocket's handshake says: it holds for messages that say nothing themselves."""
    return tracing.from_headers(scope["headers"]) if tracing.on() else None


def begin_message(message: Any, handshake: TraceContext | None, request_id: str) -> Span:
    """Of one generation on a WebSocket: `message` may name the trace that it belongs to."""
    remote = tracing.parse(message.traceparent, message.tracestate) or handshake
    attributes: Attributes = {"ryzanstein.request_id": request_id, "ryzanstein.websocket.id": message.id}
    return tracing.begin(f"{message.type} /v1/stream", remote, attributes=attributes)


def _attributes(scope: Scope) -> Attributes:
    found: dict[str, Value] = {
        "http.request.method": scope["method"],
        "url.path": redact(scope["path"]),
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if server := scope.get("server"):
        found |= {"server.address": server[0], "server.port": server[1] or 0}
    if client := scope.get("client"):
        found["client.address"] = client[0]
    agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
    return found | {"user_agent.original": agent.decode("latin-1")} if agent else found


def line_span(job: BatchJob, line: int, request_id: str) -> Span:
    """Ends when the line's result is stored."""
    if not tracing.on():
        return tracing.NONE
    created = tracing.parse(job.traceparent)
    return tracing.begin(
        f"line {job.endpoint}",
        kind="consumer",
        attributes={
            "ryzanstein.batch": job.id,
            "ryzanstein.line": line,
            "ryzanstein.request_id": request_id,
            "ryzanstein.lane": "batch",
        },
        links=[created] if created is not None else [],
    )

"""The span of a gRPC call (OpenTelemetry's conventions for RPC servers)."""

from google.rpc.code_pb2 import Code

from services.gateway.grpc.call import Call
from services.gateway.grpc.status import code_of
from services.gateway.readers.mailbox import ClientGone
from shared import tracing
from shared.tracing import Span

_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))


def begin_call(call: Call) -> Span:
    """Continues the trace that the call's metadata names; the trailers name it (`traceresponse`)."""
    remote = tracing.parse(call.metadata("traceparent"), call.metadata("tracestate"))
    method = call.headers.path.lstrip("/")[:256]
    span = tracing.begin(
        method,
        remote,
        attributes={
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "ryzanstein.request_id": call.request_id,
        },
    )
    if span.recording:
        call.trailing["traceresponse"] = span.traceparent
    return span


def end_call(span: Span, call: Call) -> None:
    """`call` has ended."""
    if not span.recording:
        return
    error = call.error
    gone = isinstance(error, ClientGone)
    status = Code.Name(0 if error is None else 1 if gone else code_of(error))
    span.set({"rpc.response.status_code": status, "gen_ai.request.model": call.model})
    if status in _FAULTS:
        span.fail(status)
    span.end()

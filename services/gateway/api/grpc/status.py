"""How a call ends: our errors as gRPC's canonical codes, with google.rpc details. Pure.

Source: google/rpc/code.proto, error_details.proto, and AIP-193.
"""

import re
from collections.abc import Mapping

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from services.gateway.api.grpc.generated.inference_pb2 import SamplingParameters
from services.gateway.core.errors import ErrorDetail, KeyReused, describe, headers_of, status_of
from services.gateway.server.http2.hpack import binary, literal, percent_encoded

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS = range(7)
PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED = range(7, 13)
INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(13, 17)

_SAMPLING = frozenset(field.name for field in SamplingParameters.DESCRIPTOR.fields)
_RENAMED = {"top_logprobs": "logprobs"}
# What the REST API calls fields of protobuf requests.
_PATHS = (
    (re.compile(r"^output_expires_after\.seconds$"), "output_expires_after_seconds"),
    (re.compile(r"^(chat_template_kwargs)\b"), r"\1_json"),
    (re.compile(r"^structured_outputs\b"), "response_format"),
    (re.compile(r"^(response_format\.json_schema\.schema)$"), r"\1_json"),
    (re.compile(r"^(tools\[\d+\]\.function\.parameters)$"), r"\1_json"),
    (re.compile(r"^tool_choice\.function\.name$"), "tool_choice.function"),
    (re.compile(r"^tool_choice\.allowed_tools\.tools\b"), "tool_choice.allowed.functions"),
    (re.compile(r"^tool_choice\.allowed_tools\b"), "tool_choice.allowed"),
)
DOMAIN = "ryzanstein"
MESSAGE_LIMIT = 1024  # bytes of `grpc-message`: clients take 8 KiB of headers, and the details say it again

# By the status that the REST API answers with.
_CODES = {
    400: INVALID_ARGUMENT,
    401: UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: NOT_FOUND,
    405: UNIMPLEMENTED,
    408: DEADLINE_EXCEEDED,
    409: FAILED_PRECONDITION,
    413: RESOURCE_EXHAUSTED,
    422: INVALID_ARGUMENT,
    429: RESOURCE_EXHAUSTED,
    499: CANCELLED,
    501: UNIMPLEMENTED,
    503: UNAVAILABLE,
    504: DEADLINE_EXCEEDED,
    507: RESOURCE_EXHAUSTED,
}


def code_of(error: BaseException) -> int:
    """The canonical code of `error`."""
    if isinstance(error, KeyReused):
        return ALREADY_EXISTS
    return _CODES.get(status_of(error), INTERNAL)


def status_message(error: BaseException, request_id: str) -> Status:
    """`error` with its details, as a google.rpc.Status."""
    shown = describe(error, request_id).error
    message = shown.message
    if shown.param:  # it names the field; a client knows it by its own name alone
        message = message.replace(f"'{shown.param}'", f"'{_path(shown.param)}'")
        shown = msgspec.structs.replace(shown, message=message)
    status = Status(code=code_of(error), message=message)
    for detail in _details(error, shown, request_id):
        status.details.add().Pack(detail)
    return status


def _details(error: BaseException, shown: ErrorDetail, request_id: str) -> list[Message]:
    info = ErrorInfo(reason=(shown.code or shown.type).upper(), domain=DOMAIN)
    if shown.param:
        info.metadata["param"] = shown.param
    details: list[Message] = [info, RequestInfo(request_id=request_id)]
    if shown.param and code_of(error) == INVALID_ARGUMENT:
        violation = BadRequest.FieldViolation(field=_path(shown.param), description=shown.message)
        details.append(BadRequest(field_violations=[violation]))
    if retry_after := headers_of(error).get("retry-after"):
        details.append(RetryInfo(retry_delay=Duration(seconds=int(retry_after))))
    return details


def _path(param: str) -> str:
    """The field of a protobuf request that the REST API calls `param`."""
    name = _RENAMED.get(param, param)
    for pattern, path in _PATHS:
        name = pattern.sub(path, name)
    return f"sampling.{name}" if name.partition(".")[0] in _SAMPLING else name


def trailers(error: BaseException | None, request_id: str, more: Mapping[str, str]) -> bytes:
    """The encoded trailing metadata of a call that ends with `error`, None: well; and `more` of it."""
    identity = literal(b"x-request-id", request_id.encode())
    for name, value in more.items():
        identity += literal(name.encode(), value.encode())
    if error is None:
        return _FINE + identity
    status = status_message(error, request_id)
    text = status.message.encode()[:MESSAGE_LIMIT].decode(errors="ignore")
    status.message = status.message[:MESSAGE_LIMIT]
    return b"".join(
        (
            literal(b"grpc-status", b"%d" % status.code),
            literal(b"grpc-message", percent_encoded(text)),
            literal(b"grpc-status-details-bin", binary(status.SerializeToString())),
            identity,
        )
    )


_FINE = literal(b"grpc-status", b"0")

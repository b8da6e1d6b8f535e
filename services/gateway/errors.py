"""Errors as the HTTP and WebSocket edge shows them: a status, and a body in OpenAI's shape."""

import math
from typing import Any

import msgspec

from shared.errors import (
    BrokerUnavailable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NoGroupAvailable,
    PayloadTooLarge,
    QueueFull,
    RyzansteinError,
    StorageFull,
    Unavailable,
    UnknownModel,
)
from shared.keys import redact


class RequestTimeout(InvalidRequest):
    """The client has not sent the whole request in time."""

    code = "request_timeout"


class KeyReused(InvalidRequest):
    """Another body came under an idempotency key that is known already."""

    code = "idempotency_key_reused"


class AuthenticationFailed(InvalidRequest):
    """There is no API key, or not one that is good."""

    code = "invalid_api_key"
    headers = {"www-authenticate": 'Bearer realm="ryzanstein"'}


class RateLimited(Unavailable):
    """A key or a tenant has done as much as it may within this minute, or has as much under way."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, wait: float = 0.0) -> None:
        """`kind`: requests or tokens, OpenAI's type of the error; `wait`: seconds to the next try, 0: none will do."""
        super().__init__(message, retry_after=math.ceil(wait) or None)
        self.kind = kind
        self.wait = wait
        self.headers = {"retry-after-ms": str(math.ceil(wait * 1000))} if wait else {}


class QuotaExceeded(InvalidRequest):
    """A tenant keeps as much as it may: waiting does not help, deleting does."""

    code = "quota_exceeded"
    headers = {"x-should-retry": "false"}
    """Asks OpenAI's clients, which would try again after a 429, not to."""


_STATUS: list[tuple[type[RyzansteinError], int]] = [
    (AuthenticationFailed, 401),
    (UnknownModel, 404),
    (ContextLengthExceeded, 400),
    (PayloadTooLarge, 413),
    (RequestTimeout, 408),
    (KeyReused, 422),
    (RateLimited, 429),
    (QuotaExceeded, 429),
    (QueueFull, 429),
    (NoGroupAvailable, 503),
    (DeadlineExceeded, 504),
    (StorageFull, 507),
    (BrokerUnavailable, 503),
    (Unavailable, 503),
]
_RETRY_AFTER = {429: 1.0, 503: 2.0, 504: 2.0}


class InvalidParameter(InvalidRequest):
    """A field of the request is wrong; `reason` is OpenAI's code for how, e.g. `invalid_type`."""

    def __init__(self, message: str, *, param: str | None, reason: str) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class RouteError(InvalidRequest):
    """The URL or method is wrong, or what it names is not there."""

    def __init__(
        self, message: str, *, status: int, reason: str, allow: str = "", param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.reason = reason
        self.allow = allow
        """Methods that the URL takes, for the header of that name."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def status_of(error: BaseException) -> int:
    """The HTTP status for `error`; 500 for what is a fault of ours."""
    if isinstance(error, RouteError):
        return error.status
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 400 if isinstance(error, InvalidRequest) else 500


def describe(error: BaseException, request_id: str) -> ErrorBody:
    """`error` for the client. A fault of ours shows nothing of our insides, only the request's id."""
    status = status_of(error)
    if status == 500 or not isinstance(error, RyzansteinError):
        message = (
            "The server failed on this request by a fault of its own; "
            f"report it with the request id {request_id}."
        )
        return ErrorBody(ErrorDetail(redact(message), "server_error", None, "internal_error"))
    code = getattr(error, "reason", None) or error.code
    kind = getattr(error, "kind", None) or _type(status)
    return ErrorBody(ErrorDetail(redact(error.message), kind, error.param, code))


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers that belong to `error`: its own, Retry-After (whole seconds, at least 1), Allow, and Connection
    where what is left of the request must not be taken for the next one."""
    headers: dict[str, str] = dict(getattr(error, "headers", {}))
    seconds: Any = getattr(error, "retry_after", None)
    if seconds is None and not isinstance(error, (RateLimited, QuotaExceeded)):
        seconds = _RETRY_AFTER.get(status_of(error))
    if seconds is not None:
        headers["retry-after"] = str(max(1, round(seconds)))
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    if isinstance(error, RouteError) and error.allow:
        headers["allow"] = error.allow
    return headers

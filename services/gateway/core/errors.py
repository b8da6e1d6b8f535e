"""Errors as clients see them: a status, and a body in OpenAI's shape."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from shared.errors import (
    BrokerUnavailable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelDoesNotFit,
    NoGroupAvailable,
    PayloadTooLarge,
    QueueFull,
    RyzansteinError,
    StorageFull,
    Unavailable,
    UnknownModel,
)
from shared.keys import redact

log = structlog.get_logger(__name__)


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


class ModelLoadFailed(Unavailable):
    """A model that was asked for could not be loaded: the same request fails again until somebody changes something."""

    code = "model_load_failed"
    retryable = False
    headers = {"x-should-retry": "false"}


_STATUS: list[tuple[type[RyzansteinError], int]] = [
    (AuthenticationFailed, 401),
    (UnknownModel, 404),
    (ModelDoesNotFit, 409),
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


CLIENT_GONE = 499
"""nginx's status for a request that its client gave up; in logs and metrics alone."""


class InvalidParameter(InvalidRequest):
    """A field of the request is wrong; `reason` is OpenAI's code for how, e.g. `invalid_type`."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None,
        reason: str = "invalid_value",
        problems: "Sequence[FieldProblem]" = (),
    ) -> None:
        super().__init__(message, param=param)
        self.reason = reason
        self.problems = problems
        """Everything that is wrong, where more than one thing is told."""


@contextlib.contextmanager
def renamed(
    names: Mapping[str, str],
    prompt: str,
    words: Mapping[str, str] = MappingProxyType({}),
    place_of: Callable[[str], str] = str,
) -> Iterator[None]:
    """Errors of what a request was translated into, in the words of the request. `names`: see `own_name`; `prompt`: its
    field that may be too long; `words`: of the error that says so, in order; `place_of`: the place in the request of
    what stands elsewhere, before it is named."""
    try:
        yield
    except InvalidParameter as error:
        if not error.param:
            raise
        param = own_name(place_of(error.param), names)
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise InvalidParameter(message, param=param, reason=error.reason) from None
    except ContextLengthExceeded as error:
        message = error.message
        for word, own in words.items():
            message = message.replace(word, own)
        raise ContextLengthExceeded(message, param=prompt) from None


def own_name(param: str, names: Mapping[str, str]) -> str:
    """What a field of a chat, or a part of one, is called in another API; a longer one of `names` stands before its
    beginning."""
    for name, ours in names.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return ours + param[len(name) :]
    return param


def hinted(error: InvalidParameter, names: Mapping[str, str]) -> InvalidParameter:
    """`error`, with the name of its own that an API has for an unknown field which is one of a chat."""
    last = (error.param or "").rpartition(".")[2]
    if error.reason != "unknown_parameter" or last not in names:
        return error
    message = f"{error.message.rstrip('.')}; this API has '{names[last]}' for it."
    return InvalidParameter(message, param=error.param, reason=error.reason)


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


class FieldProblem(msgspec.Struct, frozen=True):
    """One of several things that are wrong."""

    field: str
    message: str


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None
    errors: list[FieldProblem] | msgspec.UnsetType = msgspec.UNSET
    """Of a model's entry in the registry: all that is wrong with it."""


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def status_of(error: BaseException) -> int:
    """The HTTP status for `error`; 500 for what is a fault of ours."""
    if isinstance(error, RouteError):
        return error.status
    if isinstance(error, ClientGone):
        return CLIENT_GONE
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 400 if isinstance(error, InvalidRequest) else 500


def describe(error: BaseException, request_id: str) -> ErrorBody:
    """`error` for the client. A fault of ours shows nothing of our insides, only the request's id."""
    status = status_of(error)
    if status == 500 or not isinstance(error, RyzansteinError):
        message = (
            f"The server failed on this request because of a bug; report it with the request id {request_id}."
        )
        return ErrorBody(ErrorDetail(redact(message), "server_error", None, "internal_error"))
    code = getattr(error, "reason", None) or error.code
    kind = getattr(error, "kind", None) or _type(status)
    errors = list(getattr(error, "problems", ())) or msgspec.UNSET
    return ErrorBody(ErrorDetail(redact(error.message), kind, error.param, code, errors))


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


class ClientGone(Exception):
    """The client closed its connection."""


def log_failure(error: Exception) -> None:
    """A fault of ours with its stack trace, anything else as a line. What is wrong with a request has a code
    here: the words that say so, and the field's name, may be the client's."""
    if isinstance(error, InvalidRequest):
        log.info("request_refused", code=error.code, reason=getattr(error, "reason", "") or error.code)
    elif isinstance(error, RyzansteinError):
        fault = isinstance(error, InternalError)
        log.log(
            logging.ERROR if fault else logging.INFO, "generation_failed", code=error.code, error=str(error)
        )
    else:
        log.exception("request_failed", exc_info=error)

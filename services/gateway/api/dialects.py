"""Whose API a path belongs to: in which shape its errors are told, and in which frames its streams are sent.

path             dialect      error                                            a stream is
/v1/messages…    Anthropic    {"type": "error", "error": {type, message}}      named events
/api/…           Ollama       {"error": "message"}                             lines of JSON
all else         OpenAI       {"error": {message, type, param, code}}          events, then [DONE]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.core.asgi import EventStream, LineStream
from services.gateway.core.errors import describe, status_of

Stream = EventStream | LineStream


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API tells errors, before an answer and within a stream."""

    describe: Callable[[BaseException, str], object]
    """The body for an error, with the request's id."""
    stream: type[EventStream] | type[LineStream] = EventStream
    error_event: bytes = b""
    """The type of the event that tells of an error within a stream."""
    done: bool = True
    """Whether streams end with `[DONE]`, but for those that end otherwise in the same API."""


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""https://docs.anthropic.com/en/api/errors; what is not here is the client's fault below 500, and ours above."""


def _anthropic(error: BaseException, request_id: str) -> dict[str, Any]:
    status, detail = status_of(error), describe(error, request_id).error
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": detail.message},
        "request_id": request_id,
    }


def _ollama(error: BaseException, request_id: str) -> dict[str, str]:
    return {"error": describe(error, request_id).error.message}


OPENAI = Dialect(describe)
ANTHROPIC = Dialect(_anthropic, error_event=b"error", done=False)
OLLAMA = Dialect(_ollama, LineStream, done=False)
_PATHS: Sequence[tuple[str, Dialect]] = (("/v1/messages", ANTHROPIC), ("/api/", OLLAMA))


def of_path(path: str) -> Dialect:
    """Before anything else is known of a request."""
    return next((dialect for prefix, dialect in _PATHS if path.startswith(prefix)), OPENAI)


def of_endpoint(endpoint: str) -> Dialect:
    """Of the API whose generation it is (`GenerationRecord.endpoint`)."""
    if endpoint == "messages":
        return ANTHROPIC
    return OLLAMA if endpoint.startswith("ollama.") else OPENAI

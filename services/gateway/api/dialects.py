"""Whose API a path belongs to: in which shape its errors are told, and in which frames its streams are sent.

path             dialect      error                                            a stream is
/v1/messages…    Anthropic    {"type": "error", "error": {type, message}}      named events
/v1/models…      the same, where the request has an `anthropic-version`
/api/…           Ollama       {"error": "message"}                             lines of JSON
/v2/chat, embed  Cohere       {"id": request, "message"}                       (refused)
all else         OpenAI       {"error": {message, type, param, code}}          events, then [DONE]
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from services.gateway.core.asgi import EventStream, LineStream, header
from services.gateway.core.errors import describe, status_of
from shared.service.endpoints import Scope

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


class AnthropicDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


_ERROR_CODES = {"thread": "thread_unsupported_request"}
"""By the field that is refused: what tells Anthropic's clients to send the request again without it."""


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error object."""

    error: AnthropicDetail
    request_id: str


def anthropic_error(status: int, message: str, request_id: str, param: str | None = None) -> AnthropicError:
    """Of an HTTP status. `param`: the field that is refused."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = _ERROR_CODES.get(param or "")
    details = {"error_code": code} if code else msgspec.UNSET
    return AnthropicError(AnthropicDetail(kind, message, details), request_id)


def _anthropic(error: BaseException, request_id: str) -> AnthropicError:
    detail = describe(error, request_id).error
    return anthropic_error(status_of(error), detail.message, request_id, detail.param)


def _ollama(error: BaseException, request_id: str) -> dict[str, str]:
    return {"error": describe(error, request_id).error.message}


def _cohere(error: BaseException, request_id: str) -> dict[str, str]:
    return {"id": request_id, "message": describe(error, request_id).error.message}


OPENAI = Dialect(describe)
RESPONSES = Dialect(describe, error_event=b"error")
ANTHROPIC = Dialect(_anthropic, error_event=b"error", done=False)
OLLAMA = Dialect(_ollama, LineStream, done=False)
COHERE = Dialect(_cohere)
COHERE_CHAT, COHERE_EMBED = "/v2/chat", "/v2/embed"
ENDPOINTS = defaultdict(
    lambda: OPENAI,
    {"responses": RESPONSES, "messages": ANTHROPIC, "ollama.chat": OLLAMA, "ollama.generate": OLLAMA},
)
"""By the API whose generation it is (`GenerationRecord.endpoint`)."""
_PATHS: Sequence[tuple[str, Dialect]] = (
    ("/v1/messages", ANTHROPIC),
    ("/api/", OLLAMA),
    (COHERE_CHAT, COHERE),
    (COHERE_EMBED, COHERE),
)


def of_path(path: str) -> Dialect:
    """Before anything else is known of a request."""
    return next((dialect for prefix, dialect in _PATHS if path.startswith(prefix)), OPENAI)


def of_request(scope: Scope) -> Dialect:
    """As `of_path`, for paths that two APIs have."""
    return ANTHROPIC if anthropic_models(scope) else of_path(scope["path"])


# --- Anthropic's headers -------------------------------------------------------------------------

MESSAGES = "/v1/messages"
VERSION = b"anthropic-version"
KNOWN_VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")
"""Served alike: what the newest has taken away, such as `temperature`, works here in each."""
WARNING_HEADER = "x-ryzanstein-warning"
_RESET = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")
_OTHER = re.compile(r"[^\w.-]", re.ASCII)


def anthropic_models(scope: Scope) -> bool:
    """Whether Anthropic's list of models is asked for: its path is OpenAI's too."""
    return scope["path"].startswith("/v1/models") and header(scope, VERSION) is not None


def anthropic_headers(scope: Scope, request_id: str, headers: Mapping[str, str]) -> dict[str, str]:
    """What an answer to Anthropic's clients has beside `headers`, which tell of limits as OpenAI does."""
    more = {"request-id": request_id}
    version = header(scope, VERSION)
    if version is not None and version not in KNOWN_VERSIONS:
        shown = _OTHER.sub("?", version[:32])
        more[WARNING_HEADER] = f"anthropic-version {shown} is not known here; served as {KNOWN_VERSIONS[0]}"
    for what in ("requests", "tokens"):
        if f"x-ratelimit-limit-{what}" in headers:
            reset = time.time() + _seconds(headers[f"x-ratelimit-reset-{what}"])
            more[f"anthropic-ratelimit-{what}-limit"] = headers[f"x-ratelimit-limit-{what}"]
            more[f"anthropic-ratelimit-{what}-remaining"] = headers[f"x-ratelimit-remaining-{what}"]
            more[f"anthropic-ratelimit-{what}-reset"] = rfc3339(reset)
    return more


def _seconds(duration: str) -> float:
    """Of what `limiter.duration` has written."""
    hours, minutes, seconds, thousandths = (float(part or 0) for part in _RESET.fullmatch(duration).groups())  # type: ignore[union-attr]
    return hours * 3600 + minutes * 60 + seconds + thousandths / 1000


def rfc3339(at: float) -> str:
    """Unix seconds as Anthropic writes times."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

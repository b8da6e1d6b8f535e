"""Anthropic's errors, and the headers that its clients are told beside OpenAI's. Pure."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from services.gateway.core.asgi import header
from services.gateway.core.errors import describe, status_of
from shared.service.endpoints import Scope

# https://docs.anthropic.com/en/api/errors; what is not here is the client's fault below 500, and ours above.
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


class AnthropicDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


# By the field that is refused: what tells Anthropic's clients to send the request again without it.
_ERROR_CODES = {"thread": "thread_unsupported_request"}


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


def described(error: BaseException, request_id: str) -> AnthropicError:
    """The body for an error, with the request's id."""
    detail = describe(error, request_id).error
    return anthropic_error(status_of(error), detail.message, request_id, detail.param)


MESSAGES = "/v1/messages"
VERSION = b"anthropic-version"
# Served alike: what the newest has taken away, such as `temperature`, works here in each.
KNOWN_VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")
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

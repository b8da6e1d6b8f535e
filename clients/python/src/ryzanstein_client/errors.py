"""What the server refuses, and what is worth trying again."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

AGAIN_STATUS = frozenset({429, 502, 503})
"""A refusal for now: of a gateway that stops, a full queue, a broker that is away, a limit."""
AGAIN_CODES = frozenset({"unavailable", "broker_unavailable"})
"""Of an error in the middle of a stream: it is about this gateway, and another one goes on."""
_HOPELESS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class ApiError(Exception):
    """An error in OpenAI's shape, or an answer that is none."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        param: str | None = None,
        retry_after: float | None = None,
        request_id: str = "",
        again: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP's; 0 for an error in the middle of a stream, and for those over NATS that have none."""
        self.code = code
        self.param = param
        self.retry_after = retry_after
        """Seconds, where the server has said."""
        self.request_id = request_id
        self.again = again
        """Whether the same request may succeed later, or elsewhere."""


class LostConnection(httpx.TransportError):
    """The stream ended without its end."""


def error_from(error: Mapping[str, Any], status: int = 0) -> ApiError:
    """From the object `error` of an answer, or of an event (which has no status)."""
    code = str(error.get("code") or "")
    return ApiError(
        str(error.get("message") or "The server gave no reason."),
        status=status,
        code=code,
        again=status in AGAIN_STATUS if status else code in AGAIN_CODES,
        param=error.get("param"),
    )


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> ApiError:
    """From an answer that is not a success; whatever a proxy on the way has made of it."""
    try:
        found = error_from(json.loads(content)["error"], status)
    except (ValueError, KeyError, TypeError, AttributeError):
        found = ApiError(f"The server answered {status}, and not in JSON.", status=status, again=status in AGAIN_STATUS)
    found.request_id = headers.get("x-request-id", "")
    wait = headers.get("retry-after", "")
    found.retry_after = float(wait) if wait.isascii() and wait.isdecimal() else None
    return found


def when_again(error: Exception) -> bool | float:
    """For stamina: whether to try again, or after how many seconds."""
    if isinstance(error, ApiError) and error.again:
        return True if error.retry_after is None else error.retry_after
    return isinstance(error, httpx.TransportError) and not isinstance(error, _HOPELESS)

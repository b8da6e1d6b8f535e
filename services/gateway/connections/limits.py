"""How much a connection may ask for, and what it is told when it asks for more. Pure, but for the file limit."""

import resource
import secrets

import msgspec
import structlog

from services.gateway.errors import ErrorBody, ErrorDetail
from shared import limits

log = structlog.get_logger(__name__)

RESERVED = 32
"""Connections beyond the limit, for /health, /ready and /metrics: a full gateway is no dead one."""
OTHER_FILES = 256
"""File descriptors that are no client's connection."""


class Limits(msgspec.Struct, frozen=True):
    """Of one gateway."""

    connections: int
    head_seconds: float
    """Time for a request line and its headers."""
    head_bytes: int
    """Their size; also that of a chunk's extensions, and of all trailers."""


class Refusal(msgspec.Struct, frozen=True):
    """An answer that needs no request to be read."""

    status: int
    phrase: str
    code: str
    message: str
    retry_after: int = 0

    def response(self) -> bytes:
        """The whole HTTP response, after which the connection ends."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        body = msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, None, self.code)))
        head = [
            f"HTTP/1.1 {self.status} {self.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: req-{secrets.token_hex(12)}",
            "connection: close",
        ]
        if self.retry_after:
            head.append(f"retry-after: {self.retry_after}")
        return "\r\n".join([*head, "", ""]).encode() + body


INVALID = Refusal(
    400, "Bad Request", "invalid_http", "This is not HTTP/1.1 as RFC 9112 has it; look at the request's head."
)
PIPELINED = Refusal(
    400,
    "Bad Request",
    "invalid_http",
    "Too many requests wait on this connection; wait for answers, or use more connections "
    f"({limits.PIPELINED.cited()}).",
)
NO_HANDSHAKE = Refusal(
    400,
    "Bad Request",
    "invalid_http",
    "This is not a WebSocket's handshake as RFC 6455 has it; see its headers.",
)
SLOW = Refusal(
    408, "Request Timeout", "request_timeout", "The request was not complete in time; send it again, faster."
)
LARGE = Refusal(
    431,
    "Request Header Fields Too Large",
    "headers_too_large",
    f"The request has too many headers ({limits.HEADERS.cited()}), or they are too long; shorten them "
    f"({limits.HEAD.cited()}).",
)
FULL = Refusal(
    503,
    "Service Unavailable",
    "unavailable",
    "The gateway has as many connections as it takes; try again in a moment, or at another one.",
    retry_after=1,
)


def allow_files(connections: int) -> None:
    """Raises the process's own limit of open files, as far as it may, to what `connections` need."""
    needed = connections + RESERVED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < needed:
        log.warning(
            "few_file_descriptors",
            limit=reached,
            needed=needed,
            hint="raise `ulimit -n`, or lower RYZANSTEIN_MAX_CONNECTIONS",
        )

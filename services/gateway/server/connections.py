"""The connections that a gateway has open on all its ports, in handshakes too; how much each may ask for, and what it
is told when it asks for more.
"""

import math
import resource
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from services.gateway.core.errors import ErrorBody, ErrorDetail
from shared import limits
from shared.service.listener import ConnectionAdmission

# A full gateway is no dead one: /health, /ready, /metrics and grpc.health.v1 have places beyond the limit.
RESERVED = limits.RESERVED_CONNECTIONS.value
REFUSED = 64  # connections beyond those that are open for as long as they are told that there is no place


class ConnectionLimiter:
    """Where connections come in: who has a place, the time of their handshakes, and what is counted of those that are
    turned away."""

    def __init__(
        self,
        limit: int,
        handshake_seconds: float | None = None,
        refused: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """`limit`: connections at the same time, without those that are reserved. `refused` is told of each connection
        or request that is refused for what its connection does: the port (http, grpc) and the reason."""
        self.limit = limit
        self.refused = refused
        self.http: set[Any] = set()
        self.ops: set[Any] = set()  # of an ops port, which is counted as http
        self.grpc: set[Any] = set()
        self._handshakes: set[object] = set()
        self._handshake_seconds = handshake_seconds

    def count(self, kind: str) -> int:
        """Of `http`, of `grpc`, or of those in a `handshake`."""
        if kind == "http":
            return len(self.http) + len(self.ops)
        return len({"grpc": self.grpc, "handshake": self._handshakes}[kind])

    @property
    def _taken(self) -> int:
        return len(self.http) + len(self.ops) + len(self.grpc) + len(self._handshakes)

    @property
    def full(self) -> bool:
        """Whether the newest connection is one too many for all but the reserved purposes."""
        return self._taken > self.limit

    @property
    def overfull(self) -> bool:
        """Whether the newest connection is one too many for any purpose."""
        return self._taken > self.limit + RESERVED

    @property
    def sentence(self) -> str:
        """Why there is no place, and what to do."""
        return (
            f"Connection limit reached; retry shortly, or use another gateway ({limits.CONNECTIONS.cited(self.limit)})."
        )

    def admission(self, port: str) -> ConnectionAdmission:
        """For the listener of one port."""

        def admits() -> bool:
            """One more may be opened, if only to be told that it is one too many."""
            found = self._taken < self.limit + RESERVED + REFUSED
            if not found:
                self.refused(port, "full")
            return found

        def failed(protocol: object) -> None:
            self._handshakes.discard(protocol)
            self.refused(port, "handshake")

        connections = self.http if port == "http" else self.grpc
        return ConnectionAdmission(self._handshake_seconds, admits, self._handshakes.add, failed, connections)

    def opened(self, protocol: object) -> None:
        """`protocol` is in its port's set of connections from now on."""
        self._handshakes.discard(protocol)


log = structlog.get_logger(__name__)

OTHER_FILES = 256  # file descriptors that are no client's connection: NATS among them
FEWEST = 16  # connections that are taken however few files may be open


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Of one connection."""

    head_seconds: float  # time for a request line and its headers
    head_bytes: int  # their size; also that of a chunk's extensions, and of all trailers


class ConnectionRefusal(msgspec.Struct, frozen=True):
    """An answer that needs no request to be read."""

    message: str
    status: int = 400
    code: str = "invalid_http"
    retry_after: int = 0

    def response(self) -> bytes:
        """The whole HTTP response, after which the connection ends."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        body = msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, None, self.code)))
        head = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: req-{secrets.token_hex(12)}",
            "connection: close",
        ]
        if self.retry_after:
            head.append(f"retry-after: {self.retry_after}")
        return "\r\n".join([*head, "", ""]).encode() + body


INVALID = ConnectionRefusal("Malformed HTTP/1.1 (RFC 9112); check the request's head.")
PIPELINED = ConnectionRefusal(
    "Too many pipelined requests on this connection; wait for answers, or use more connections "
    f"({limits.PIPELINED.cited()})."
)
NO_HANDSHAKE = ConnectionRefusal("Malformed WebSocket handshake (RFC 6455); check its headers.")
HOST = ConnectionRefusal("The request has no Host header, or several; HTTP/1.1 requires exactly one (RFC 9112, 3.2).")
VERSION = ConnectionRefusal(
    "This port speaks HTTP/1.1 and HTTP/1.0; send the request in one of them. gRPC has a port of its own.", 505
)
EXPECTATION = ConnectionRefusal("Unsupported Expect header; only 100-continue is supported.", 417)


def slow(found: ConnectionLimits) -> ConnectionRefusal:
    return ConnectionRefusal(
        f"The request's line and headers were not complete within {found.head_seconds:g} s; send it again, faster "
        f"({limits.HEAD_SECONDS.cited(math.ceil(found.head_seconds))}).",
        408,
        "request_timeout",
    )


def large(found: ConnectionLimits) -> ConnectionRefusal:
    return ConnectionRefusal(
        f"The request has too many headers ({limits.HEADERS.cited()}), or they are too long; shorten them "
        f"({limits.HEAD.cited(found.head_bytes)}).",
        431,
        "headers_too_large",
    )


def full(sentence: str) -> ConnectionRefusal:
    """`sentence` says why there is no place."""
    return ConnectionRefusal(sentence, 503, "unavailable", retry_after=1)


def allowed_by_files(connections: int) -> int:
    """How many of so many connections the process may have: its limit of open files is raised as far as it may be,
    and what is no client's connection has its share of them first."""
    others = RESERVED + REFUSED + OTHER_FILES
    needed = connections + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return connections
    reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < needed:
        log.warning(
            "max_connections_reduced",
            limit=reached,
            needed=needed,
            connections=max(FEWEST, reached - others),
            hint="raise `ulimit -n`, or lower RYZANSTEIN_MAX_CONNECTIONS",
        )
    return min(connections, max(FEWEST, reached - others))

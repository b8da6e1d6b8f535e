"""The connections that a gateway has open on all its ports, in handshakes too."""

from collections.abc import Callable, Sized

from shared import limits
from shared.service.listener import Admission

RESERVED = limits.RESERVED_CONNECTIONS.value
"""A full gateway is no dead one: /health, /ready, /metrics and grpc.health.v1 have places beyond the limit."""
REFUSED = 64
"""Connections beyond those that are open for as long as they are told that there is no place."""


class Places:
    """`http` and `grpc` are their ports' own sets of connections."""

    def __init__(self, limit: int) -> None:
        """`limit`: connections at the same time, without those that are reserved."""
        self.limit = limit
        self.http: Sized = ()
        self.grpc: Sized = ()
        self.handshakes: set[object] = set()

    @property
    def taken(self) -> int:
        return len(self.http) + len(self.grpc) + len(self.handshakes)

    @property
    def full(self) -> bool:
        """Whether the newest connection is one too many for all but the reserved purposes."""
        return self.taken > self.limit

    @property
    def overfull(self) -> bool:
        """Whether the newest connection is one too many for any purpose."""
        return self.taken > self.limit + RESERVED

    def admits(self) -> bool:
        """Whether a connection may be opened, if only to be told that it is one too many."""
        return self.taken < self.limit + RESERVED + REFUSED

    @property
    def sentence(self) -> str:
        """Why there is no place, and what to do."""
        return (
            "The gateway has as many connections as it takes; try again in a moment, or at another one "
            f"({limits.CONNECTIONS.cited(self.limit)})."
        )


class Door:
    """Where connections come in: their places, the time of their handshakes, and what is counted of those that are
    turned away."""

    def __init__(
        self,
        places: Places,
        handshake_seconds: float | None = None,
        refused: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """`refused` is told of each connection or request that is refused for what its connection does: the port
        (http, grpc) and the reason."""
        self.places = places
        self.refused = refused
        self._handshake_seconds = handshake_seconds

    def admission(self, port: str) -> Admission:
        """For the listener of one port."""

        def admits() -> bool:
            found = self.places.admits()
            if not found:
                self.refused(port, "full")
            return found

        def failed(protocol: object) -> None:
            self.places.handshakes.discard(protocol)
            self.refused(port, "handshake")

        return Admission(self._handshake_seconds, admits, self.places.handshakes.add, failed)

    def opened(self, protocol: object) -> None:
        """`protocol` is in its port's set of connections from now on."""
        self.places.handshakes.discard(protocol)

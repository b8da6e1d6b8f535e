"""What the gateway holds for the clients of all connections: answers that they have not read, requests that have not
come whole; and who is let go for it.

A client may read slowly. One of HTTP that takes nothing for `unread_seconds` is let go (gRPC's connections see to that
themselves, for their windows hold answers back too). Beyond `owed` or `arriving` bytes of all connections those with
the most are closed.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import structlog

from services.gateway.server.connections import ConnectionLimiter
from shared import limits

log = structlog.get_logger(__name__)

LOOK = 1.0  # seconds between two looks at all connections
K = TypeVar("K")


class HeldConnection(Protocol):
    """A connection."""

    @property
    def owed(self) -> int:
        """Bytes of answers that its client has not read."""
        ...

    @property
    def arriving(self) -> int:
        """Bytes of requests that have not come whole."""
        ...

    def abort(self) -> None:
        """Closes it at once."""
        ...


class UnreadAnswers(Generic[K]):
    """Decides who has taken nothing for too long. Pure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # How many bytes a client was last seen to have left, and since when.
        self._unchanged: dict[K, tuple[int, float]] = {}

    def stuck(self, owed: Mapping[K, int], now: float) -> list[K]:
        """Of connections that are written to only as far as there is room, those that have taken nothing for too long:
        as many bytes wait as did then. `owed` has those alone that have left something."""
        self._unchanged = {
            key: seen if (seen := self._unchanged.get(key)) is not None and seen[0] == size else (size, now)
            for key, size in owed.items()
        }
        return [key for key, (_, since) in self._unchanged.items() if now - since > self._seconds]


def excess(held: Mapping[K, int], limit: int) -> list[K]:
    """The connections with the most bytes, until the others have no more than the limit."""
    total, found = sum(held.values()), []
    if total > limit:
        for key in sorted(held, key=held.__getitem__, reverse=True):
            found.append(key)
            total -= held[key]
            if total <= limit:
                break
    return found


class HeldWatch:
    """Looks at the connections of a door every second."""

    def __init__(
        self, door: ConnectionLimiter, owed: int, arriving: int, seconds: float = limits.UNREAD_SECONDS.value
    ) -> None:
        """`owed`, `arriving`: bytes of all connections together. `seconds`: time in which a client of HTTP has to read
        something."""
        self._door = door
        self._owed = owed
        self._arriving = arriving
        self._seconds = seconds
        self._unread: UnreadAnswers[Any] = UnreadAnswers(seconds)
        self._totals = dict.fromkeys(itertools.product(("http", "grpc"), ("owed", "arriving")), 0)

    def total(self, port: str, kind: str) -> int:
        """Bytes `owed` or `arriving` on a port at the last look."""
        return self._totals[port, kind]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self.look(time.perf_counter())

    def look(self, now: float) -> None:
        """`now`: seconds of any clock."""
        ports = {"http": self._door.http | self._door.ops, "grpc": set(self._door.grpc)}
        owed = {(port, each): size for port, readers in ports.items() for each in readers if (size := each.owed)}
        arriving = {
            (port, each): size for port, readers in ports.items() for each in readers if (size := each.arriving)
        }
        for name in self._totals:
            sizes = owed if name[1] == "owed" else arriving
            self._totals[name] = sum(size for (port, _), size in sizes.items() if port == name[0])
        of_http = {key: size for key, size in owed.items() if key[0] == "http"}
        for key in self._unread.stuck(of_http, now):
            self._let_go(key, "unread", owed.pop(key), limits.UNREAD_SECONDS.cited(int(self._seconds)))
        for key in excess(owed, self._owed):
            self._let_go(key, "unread", owed[key], limits.OWED.cited(self._owed))
        for key in excess(arriving, self._arriving):
            self._let_go(key, "incomplete", arriving[key], limits.ARRIVING.cited(self._arriving))

    def _let_go(self, key: tuple[str, HeldConnection], reason: str, size: int, cited: str) -> None:
        port, client = key
        log.warning("connection_closed_for_bytes", port=port, reason=reason, bytes=size, limit=cited)
        self._door.refused(port, reason)
        client.abort()

"""Answers that clients have not read, of all connections together: how many bytes they are, and who is let go for them.

A client may read slowly. One of HTTP that takes nothing for `unread_seconds` is let go (gRPC's connections see to that
themselves, for their windows hold answers back too), and beyond `owed` bytes in all those that were left most.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import structlog

from services.gateway.server.connections import Door
from shared import limits

log = structlog.get_logger(__name__)

LOOK = 1.0
"""Seconds between two looks at all connections."""
K = TypeVar("K")


class Reader(Protocol):
    """A connection."""

    @property
    def owed(self) -> int:
        """Bytes of answers that its client has not read."""
        ...

    def abort(self) -> None:
        """Closes it at once."""
        ...


class UnreadAnswers(Generic[K]):
    """Decides who is let go. Pure."""

    def __init__(self, limit: int, seconds: float) -> None:
        """`limit`: bytes of all connections together. `seconds`: time in which a client has to read something."""
        self._limit = limit
        self._seconds = seconds
        self._unchanged: dict[K, tuple[int, float]] = {}
        """How many bytes a client was last seen to have left, and since when."""

    def stuck(self, owed: Mapping[K, int], now: float) -> list[K]:
        """Of connections that are written to only as far as there is room, those that have taken nothing for too long:
        as many bytes wait as did then. `owed` has those alone that have left something."""
        self._unchanged = {
            key: seen if (seen := self._unchanged.get(key)) is not None and seen[0] == size else (size, now)
            for key, size in owed.items()
        }
        return [key for key, (_, since) in self._unchanged.items() if now - since > self._seconds]

    def excess(self, owed: Mapping[K, int]) -> list[K]:
        """The connections with the most, until the others have no more than the limit."""
        total, found = sum(owed.values()), []
        if total > self._limit:
            for key in sorted(owed, key=owed.__getitem__, reverse=True):
                found.append(key)
                total -= owed[key]
                if total <= self._limit:
                    break
        return found


class UnreadWatch:
    """Looks at the connections of a door every second."""

    def __init__(self, door: Door, limit: int, seconds: float = limits.UNREAD_SECONDS.value) -> None:
        self._door = door
        self._limit = limit
        self._answers: UnreadAnswers[Any] = UnreadAnswers(limit, seconds)
        self._seconds = seconds
        self._totals = {"http": 0, "grpc": 0}

    def total(self, port: str) -> int:
        """Bytes that the clients of a port had left at the last look."""
        return self._totals[port]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self.look(time.perf_counter())

    def look(self, now: float) -> None:
        """`now`: seconds of any clock."""
        door = self._door
        http, grpc = _owed(door.http | door.ops), _owed(door.grpc)
        self._totals = {"http": sum(http.values()), "grpc": sum(grpc.values())}
        for reader in self._answers.stuck(http, now):
            self._let_go("http", reader, http.pop(reader), limits.UNREAD_SECONDS.cited(int(self._seconds)))
        for reader in self._answers.excess(http | grpc):
            port, size = ("http", http[reader]) if reader in http else ("grpc", grpc[reader])
            self._let_go(port, reader, size, limits.OWED.cited(self._limit))

    def _let_go(self, port: str, reader: Reader, size: int, cited: str) -> None:
        log.warning("answers_not_read", port=port, bytes=size, limit=cited)
        self._door.refused(port, "unread")
        reader.abort()


def _owed(readers: set[Any]) -> dict[Any, int]:
    return {reader: size for reader in readers if (size := reader.owed)}

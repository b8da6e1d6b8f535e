"""Where a client's request waits for the events of its generations."""

import asyncio
import time
from typing import NamedTuple

from shared.errors import RyzansteinError
from shared.messages import TokenEntry


class Event(NamedTuple):
    """News of one choice: new tokens, or the error that ended it."""

    choice: int
    news: TokenEntry | RyzansteinError


class ClientGone(Exception):
    """The client closed its connection."""


class Mailbox:
    """Many generations put, one reader takes everything there is at once.

    A reader that is slow (its client is) finds several entries and makes one write of them: nothing grows
    but the tokens themselves, and those are bounded by the request.
    """

    __slots__ = ("_closed", "_events", "_waiter", "since")

    def __init__(self) -> None:
        self.since = 0.0
        """When the first of the events that are here, or were last taken, was put (`time.perf_counter`)."""
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed: BaseException | None = None

    def put(self, choice: int, news: TokenEntry | RyzansteinError) -> None:
        if not self._events:
            self.since = time.perf_counter()
        self._events.append(Event(choice, news))
        self._wake()

    def close(self, reason: BaseException) -> None:
        """Lets the reader fail with `reason`, now and from now on."""
        self._closed = reason
        self._wake()

    async def take(self) -> list[Event]:
        """Waits for events and returns all there are. One reader at a time."""
        if not self._events and self._closed is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._closed is not None:
            raise self._closed
        events, self._events = self._events, []
        return events

    def take_now(self) -> list[Event]:
        """What there is, without waiting."""
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

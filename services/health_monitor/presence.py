"""Whose connection to the broker was cut: a process that is killed is known at once by that.

The broker tells of connections that open and close, where its configuration lets us hear of them
(docs/operations.md); where it does not, silence says the same some seconds later.

    closed by the process ──GRACE──▶ cut          it has not come back
         └── opened again, or heard ──▶ nothing    a connection that was renewed
    closed by the broker (a slow consumer, its own end) ──▶ nothing: the process lives
"""

from datetime import datetime

import msgspec

GRACE = 0.25
"""Seconds in which a client that lives is back: nats-py waits 0.1 s before it connects again."""
_BY_THE_PROCESS = ("Client Closed", "Read Error", "Write Error")
"""How nats-server calls what the operating system does for a process that is gone (`ClosedState`)."""


class ConnectedClient(msgspec.Struct, frozen=True):
    """Who is connected, as nats-server tells it."""

    start: datetime
    name: str = ""


class ConnectionEvent(msgspec.Struct, frozen=True):
    """A connection has opened or closed: $SYS.ACCOUNT.*.CONNECT and .DISCONNECT (JSON)."""

    client: ConnectedClient
    reason: str = ""


class Presence:
    """Connections by name. Pure: times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._opened: dict[str, datetime] = {}
        self._closed: dict[str, float] = {}

    def opened(self, event: ConnectionEvent) -> None:
        self._closed.pop(event.client.name, None)
        self._opened[event.client.name] = event.client.start

    def closed(self, event: ConnectionEvent, now: float) -> None:
        name = event.client.name
        newest = self._opened.get(name)
        if newest is not None and event.client.start < newest:
            return  # its successor is here already
        self._opened.pop(name, None)
        if event.reason in _BY_THE_PROCESS:
            self._closed[name] = now

    def heard(self, name: str) -> None:
        """A message of that connection has come."""
        self._closed.pop(name, None)

    def cut(self, now: float) -> list[str]:
        """Connections that are gone for good, each told once."""
        due = [name for name, closed in self._closed.items() if now - closed >= GRACE]
        for name in due:
            del self._closed[name]
        return due

    def pardon(self, now: float) -> None:
        """We have not been listening: who was about to be given up may have come back."""
        self._closed = dict.fromkeys(self._closed, now)

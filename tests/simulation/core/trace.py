"""What happened in a world, in its order: a digest of all of it always, and each event where a story is wanted.

    start gateway-1   message gateway-1 → nats-1 (its bytes)   cut …   kill …       ──▶ digest, marks, (events)

Two runs of a seed are the same run if their digests are equal. If they are not, their marks say about where they part.
"""

import hashlib
import struct
from typing import NamedTuple

EVERY = 4096  # entries from one mark to the next
_HEAD = struct.Struct("<dII").pack


class Event(NamedTuple):
    at: float  # virtual seconds since the beginning
    process: str  # whose doing, or to whom it happened; a host's name for what happens to a host
    # start, kill, exit, pause, resume, signal, power, connect, message, lost, failure, log, or a fault's name
    kind: str
    detail: str | bytes  # of a message: its bytes, as many as were written in one go
    other: str = ""  # of a connection or message: the process on the other side


class Mark(NamedTuple):
    count: int
    at: float
    digest: str


class Trace:
    def __init__(self) -> None:
        self.events: list[Event] = []  # empty unless they are kept
        self._keep = False
        self.marks: list[Mark] = []
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._update = self._hash.update

    def keep(self, yes: bool = True) -> None:
        """Whether each entry is kept from now on, for a story."""
        self._keep = yes

    def digest(self) -> str:
        """Of all entries so far."""
        return self._hash.copy().hexdigest()

    def add(self, at: float, process: str, kind: str, detail: str = "", other: str = "") -> None:
        """What happened, told in words."""
        self._update(f"{at!r} {process} {kind} {detail} {other}\n".encode())
        self._counted(at)
        if self._keep:
            self.events.append(Event(at, process, kind, detail, other))

    def message(self, at: float, number: int, process: str, other: str, data: bytes) -> None:
        """Bytes that a process wrote to connection `number`."""
        self._update(_HEAD(at, number, len(data)))
        self._update(data)
        self._counted(at)
        if self._keep:
            self.events.append(Event(at, process, "message", data, other))

    def _counted(self, at: float) -> None:
        self.count += 1
        if not self.count % EVERY:
            self.marks.append(Mark(self.count, at, self.digest()))


def parted(one: list[Mark], other: list[Mark]) -> tuple[float, float] | None:
    """Between which virtual times two runs of a seed began to differ; None: not before the last mark of both."""
    since = 0.0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return since, max(mine.at, theirs.at)
        since = mine.at
    return None

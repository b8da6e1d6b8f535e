"""What a leader and its ranks tell each other of a transfer: commands in step plans (`StepPlan.handover`), and in
shared memory beside the ring's board how far each rank has come. One writer per field, each an aligned 64-bit integer,
so that no lock is needed:

    | totals: blocks sent, received, failed; nanoseconds; hand-overs   (leader) |
    | rank 0: listening, landed, sent, ended                           (rank 0) |
    | rank 1: ...                                                      (rank 1) |

A rank's field is the number of the batch that it is about, and a number below 2^32: so nothing is read of a batch
that is over.
"""

import asyncio
import mmap
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import msgspec

_WORD = 8
_HALF = 32


class _Total(IntEnum):
    SENT = 0
    RECEIVED = 1
    FAILED = 2
    NANOSECONDS = 3
    COUNT = 4
    SIZE = 8


class Field(IntEnum):
    """Of one rank."""

    LISTENING = 0
    """At which port; 0: it cannot."""
    LANDED = 1
    """Blocks received, from the first without a gap."""
    SENT = 2
    """Blocks that the other side has acknowledged, from the first without a gap."""
    ENDED = 3
    """1: the rank reads the blocks it sends no more; 2: and not all have been acknowledged."""
    SIZE = 4


class HandoverTotals(msgspec.Struct, frozen=True):
    """Since the ring started."""

    sent: int = 0
    """Blocks; one block is counted once, not once per rank."""
    received: int = 0
    failed: int = 0
    seconds: float = 0.0
    count: int = 0
    """Hand-overs, given and taken, that have ended."""


class RankReport:
    """One rank's fields, for that rank to write."""

    def __init__(self, words: memoryview, offset: int) -> None:
        self._words = words
        self._offset = offset

    def write(self, field: Field, batch: int, number: int) -> None:
        self._words[self._offset + field] = batch << _HALF | number


class HandoverBoard:
    """The whole board."""

    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        self.ranks = ranks
        size = (_Total.SIZE + ranks * Field.SIZE) * _WORD
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def beside(cls, board: str, ranks: int) -> "HandoverBoard | None":
        """The one beside the ring's board; None where the ring has none, hence hands nothing over."""
        path = cls.path(Path(board))
        return cls(path, ranks) if path.exists() else None

    @staticmethod
    def path(board: Path) -> Path:
        return board.with_name("handover")

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def rank(self, rank: int) -> RankReport:
        return RankReport(self._words, self._row(rank))

    def numbers(self, field: Field, batch: int) -> list[int | None]:
        """What each rank says of `batch`; None where it has said nothing yet."""
        words = (self._words[self._row(rank) + field] for rank in range(self.ranks))
        return [word & (1 << _HALF) - 1 if word >> _HALF == batch else None for word in words]

    def least(self, field: Field, batch: int) -> int:
        """The smallest number of all ranks; one that has said nothing yet counts as 0."""
        return min(number or 0 for number in self.numbers(field, batch))

    def add(
        self, *, sent: int = 0, received: int = 0, failed: int = 0, seconds: float = 0.0, count: int = 0
    ) -> None:
        """By the leader."""
        added = (sent, received, failed, round(seconds * 1e9), count)
        for index, number in enumerate(added):
            self._words[index] += number

    @property
    def totals(self) -> HandoverTotals:
        sent, received, failed, nanoseconds, count = self._words[: _Total.COUNT + 1]
        return HandoverTotals(sent, received, failed, nanoseconds / 1e9, count)

    @staticmethod
    def _row(rank: int) -> int:
        return _Total.SIZE + rank * Field.SIZE


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Listen, and take the next `count` blocks from whoever has `key`. An earlier batch is over."""

    batch: int
    key: bytes
    count: int


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send these blocks, in this order, to the rank of the same number."""

    batch: int
    key: bytes
    addresses: list[tuple[str, int]]
    """`(host, port)` per rank."""
    blocks: list[int]
    within: float
    """Seconds after which what has not been acknowledged is given up."""


class StopReceiving(msgspec.Struct, frozen=True, array_like=True, tag="stop-receiving"):
    """Listen no more, and forget what was received."""


class StopSending(msgspec.Struct, frozen=True, array_like=True, tag="stop-sending"):
    """Send no more of the batch; the rank says when it has stopped."""


Command = Receive | Send | StopReceiving | StopSending
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    return msgspec.msgpack.encode(command)


def decode_command(payload: bytes) -> Command:
    """Raises `msgspec.DecodeError`."""
    return _decoder.decode(payload)


POLL = 0.003
"""Seconds between two looks."""


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns as soon as `condition` holds, or after `seconds`; whether it holds."""
    by = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() >= by:
            return False
        await asyncio.sleep(POLL)

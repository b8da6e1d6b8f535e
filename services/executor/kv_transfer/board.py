"""What a leader and its ranks tell each other of a transfer: commands in step plans (`StepPlan.handover`), and in
shared memory beside the ring's board how far each rank has come.

A rank's field is the number of the batch that it is about, and a number below 2^32: so nothing is read of a batch
that is over.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from services.executor.ipc.table import map_tables, table

_HALF = 32


@table
class HandoverTotals(ctypes.Structure):
    """Since the ring started."""

    sent: int  # blocks; one block is counted once, not once per rank
    received: int
    failed: int
    seconds: float
    count: int  # hand-overs, given and taken, that have ended


@table
class _Rank(ctypes.Structure):
    listening: int  # at which port; 0: it cannot
    landed: int  # blocks received, from the first without a gap
    sent: int  # blocks that the other side has acknowledged, from the first without a gap
    ended: int  # 1: the rank reads the blocks it sends no more; 2: and not all have been acknowledged


Field = Literal["listening", "landed", "sent", "ended"]  # of one rank


class RankReport:
    """One rank's fields, for that rank to write."""

    def __init__(self, row: _Rank) -> None:
        self._row = row

    def write(self, field: Field, batch: int, number: int) -> None:
        setattr(self._row, field, batch << _HALF | number)


class HandoverBoard:
    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        self.totals: HandoverTotals
        self.totals, self._rows = map_tables(path, HandoverTotals, _Rank * ranks, create=create)

    @classmethod
    def beside(cls, board: str, ranks: int) -> "HandoverBoard | None":
        """The one beside the ring's board; None where the ring has none, hence hands nothing over."""
        path = cls.path(Path(board))
        return cls(path, ranks) if path.exists() else None

    @staticmethod
    def path(board: Path) -> Path:
        return board.with_name("handover")

    def rank(self, rank: int) -> RankReport:
        return RankReport(self._rows[rank])

    def numbers(self, field: Field, batch: int) -> list[int | None]:
        """What each rank says of `batch`; None where it has said nothing yet."""
        words = (getattr(row, field) for row in self._rows)
        return [word & (1 << _HALF) - 1 if word >> _HALF == batch else None for word in words]

    def least(self, field: Field, batch: int) -> int:
        """The smallest number of all ranks; one that has said nothing yet counts as 0."""
        return min(number or 0 for number in self.numbers(field, batch))


class OwnRing(NamedTuple):
    """This ring, as its peers know it."""

    group: str
    epoch: int
    model: str
    format: str  # of its blocks: rings of one format can give them to each other
    host: str  # where its ranks listen
    block_size: int
    block_bytes: int  # of a full block on one rank


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Listen, and take the next `count` blocks from whoever has `key`. An earlier batch is over."""

    batch: int
    key: bytes
    count: int


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send these blocks, in this order, to the rank of the same number."""

    batch: int
    key: bytes
    addresses: list[tuple[str, int]]  # `(host, port)` per rank
    blocks: list[int]
    within: float  # seconds after which what has not been acknowledged is given up


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


POLL = 0.003  # seconds between two looks


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns as soon as `condition` holds, or after `seconds`; whether it holds."""
    by = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() >= by:
            return False
        await asyncio.sleep(POLL)

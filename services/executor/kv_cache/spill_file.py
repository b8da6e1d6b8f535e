"""A rank's spilled blocks in files with names, which outlive the ring that has written them.

    ryzanstein-kv-N-rank-R.index     header │ record of slot 0 │ record of slot 1 │ ...   what is in a slot
    ryzanstein-kv-N-rank-R.blocks             slot 0 │ slot 1 │ ...                       its bytes

A slot is written in three steps: its record is cleared, then come the bytes, then the new record. The system keeps what
a process has written before it was killed, so a record that can be read stands for bytes that are there. A host that
loses its power may keep the record and not the bytes: the checksum in the record tells that when they are read, as it
tells any other damage. Nothing is ever synchronized for it.

The header is the fingerprint of all that the bytes depend on. Files with another one are discarded, and never read.

Rings of one directory have a number N each. The leader chooses a free one whose files have its fingerprint, else any
free one: so there are as many files as there were rings at once, whatever their groups are called. Whoever uses a file
has locked its index, until its process ends.

What a ring finds when it starts (`recover`) is what all its ranks have of the same block in the same slot. It takes
reading the indexes alone.
"""

import contextlib
import fcntl
import gc
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.kv_cache.capacity import smallest
from services.executor.kv_cache.prefix_index import CHOICE_SIZE, PARENT_SIZES, BlockKey

log = structlog.get_logger(__name__)

HEADER_BYTES = 64
_MAGIC = b"ryzanstein kv 1\n"
_CHECK = struct.Struct("<I")
# Order of writing, checksum of the bytes, lengths of parent and tokens, digest, parent.
_HEAD = struct.Struct(f"<QIHH16s{max(PARENT_SIZES)}s")
_MARK_BYTES = 16  # of a key's tokens, beside tokens and the name of a choice
_RECORDS_PER_READ = 1 << 14
_SLOTS_PER_SUM = 1 << 12  # of which ranks tell each other at a time
_DIGEST_WORDS = 2


class KeptBlock(NamedTuple):
    """What a slot holds."""

    slot: int
    key: BlockKey
    checksum: int  # CRC-32 of its bytes
    order: int  # of writing, from 1 on


class Records:
    """The format of an index behind its header: fixed records, one for each slot. Pure."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._most_tokens = 4 * block_size + CHOICE_SIZE + _MARK_BYTES
        self.size = _CHECK.size + _HEAD.size + self._most_tokens

    def pack(self, block: KeptBlock) -> bytes:
        """The record of `block`. Raises ValueError where its key is longer than keys are."""
        digest, parent, tokens = block.key
        if len(tokens) > self._most_tokens or len(parent) > max(PARENT_SIZES):
            raise ValueError(f"a key of {len(parent)} and {len(tokens)} bytes belongs to none of these blocks")
        head = _HEAD.pack(block.order, block.checksum, len(parent), len(tokens), digest, parent)
        body = (head + tokens).ljust(self.size - _CHECK.size, b"\0")
        return _CHECK.pack(zlib.crc32(body)) + body

    def read(self, content: bytes, first: int = 0) -> Iterator[KeptBlock]:
        """The blocks of the records in `content`, whose first one is of slot `first`. What is empty, torn or damaged
        is left out."""
        whole = len(content) // self.size
        rows = np.frombuffer(content, np.uint8, whole * self.size).reshape(whole, self.size)
        for row in np.flatnonzero(rows[:, : _CHECK.size].any(1)).tolist():
            record = content[row * self.size : (row + 1) * self.size]
            body = record[_CHECK.size :]
            if zlib.crc32(body) != _CHECK.unpack_from(record)[0]:
                continue
            order, checksum, parent_size, tokens_size, digest, parent = _HEAD.unpack_from(body)
            tokens = body[_HEAD.size : _HEAD.size + tokens_size]
            yield KeptBlock(first + row, BlockKey(digest, parent[:parent_size], tokens), checksum, order)


class SpillPlace(NamedTuple):
    """Where a rank keeps its slots, and what they are."""

    directory: Path
    rank: int
    world_size: int
    fingerprint: bytes  # 32 bytes: of all that a block's bytes depend on, on this rank
    block_size: int  # tokens of a block
    block_bytes: int
    num_slots: int

    def path(self, number: int, kind: str) -> Path:
        return self.directory / f"ryzanstein-kv-{number}-rank-{self.rank}.{kind}"

    @property
    def header(self) -> bytes:
        sizes = struct.pack("<II", self.block_size, self.block_bytes)
        return (_MAGIC + self.fingerprint + sizes).ljust(HEADER_BYTES, b"\0")

    def numbers(self) -> list[int]:
        """Those that this rank has files of, ascending."""
        found = self.directory.glob(f"ryzanstein-kv-*-rank-{self.rank}.index")
        names = (path.name.split("-")[2] for path in found)
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


class SpillFile:
    """An opened pair of files, which nobody else uses."""

    def __init__(self, place: SpillPlace, number: int, index: int, blocks: int) -> None:
        self.number = number
        self.blocks = blocks  # descriptor of the file of bytes: slot s begins at s * block_bytes
        self._place = place
        self._index = index
        self._records = Records(place.block_size)
        self._order = 0

    @classmethod
    def open(cls, place: SpillPlace, number: int) -> "SpillFile | None":
        """Files that are not there are made, and those with another fingerprint emptied. None: another process uses
        them. Raises OSError."""
        index = _open(place.path(number, "index"))
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(index)
            return None
        blocks = -1
        try:
            blocks = _open(place.path(number, "blocks"))
            file = cls(place, number, index, blocks)
            file._prepare()
        except BaseException:
            _close(index, blocks)
            raise
        return file

    def _prepare(self) -> None:
        place, header = self._place, os.pread(self._index, HEADER_BYTES, 0)
        limits = (HEADER_BYTES + place.num_slots * self._records.size, place.num_slots * place.block_bytes)
        if header != place.header:
            if header:
                log.warning(
                    "kv_spill_discarded",
                    file=str(place.path(self.number, "blocks")),
                    reason="it is of another model, version or rank, or of other settings",
                )
            limits = (0, 0)
        for file, limit in zip((self._index, self.blocks), limits, strict=True):
            if os.fstat(file).st_size > limit:
                os.ftruncate(file, limit)
        if header != place.header:
            _write(self._index, place.header, 0)

    def read(self) -> list[KeptBlock]:
        """What is in the slots, in the order in which it was written."""
        size, place = self._records.size, self._place
        slots = min(place.num_slots, os.fstat(self.blocks).st_size // place.block_bytes)
        found: list[KeptBlock] = []
        with _without_gc():
            for first in range(0, slots, _RECORDS_PER_READ):
                count = min(_RECORDS_PER_READ, slots - first)
                content = os.pread(self._index, count * size, HEADER_BYTES + first * size)
                found += self._records.read(content, first)
        found.sort(key=lambda block: block.order)
        self._order = found[-1].order if found else 0
        return found

    def clear(self, slot: int) -> None:
        """The bytes in `slot` are going to be others. Raises OSError."""
        _write(self._index, bytes(_CHECK.size), HEADER_BYTES + slot * self._records.size)

    def put(self, slot: int, key: BlockKey, checksum: int) -> None:
        """The bytes in `slot`, which have been written, are those of `key`. Raises OSError."""
        self._order += 1
        record = self._records.pack(KeptBlock(slot, key, checksum, self._order))
        _write(self._index, record, HEADER_BYTES + slot * self._records.size)

    def close(self) -> None:
        """Others may use the files. Safe to call twice."""
        _close(self._index, self.blocks)
        self._index = self.blocks = -1


def take(place: SpillPlace) -> SpillFile | None:
    """For the leader of a ring: the files of a number that nobody uses, best one that has blocks of this ring's kind.
    Raises OSError."""
    with _alone(place.directory):
        numbers, spare = place.numbers(), []
        for number in numbers:
            if _is_used(place, number):
                continue
            if _header(place, number) == place.header:
                return SpillFile.open(place, number)
            spare.append(number)
        new = next(number for number in range(len(numbers) + 1) if number not in numbers)
        return SpillFile.open(place, spare[0] if spare else new)


def recover(
    place: SpillPlace, device: torch.device, collectives: Collectives
) -> tuple[SpillFile | None, list[KeptBlock]]:
    """The files in which this rank keeps its slots from now on, and the blocks that every rank has in the same of them
    from before, in the order of writing. To be called by all ranks. None, and said: files that outlive the ring cannot
    be had."""
    began = time.monotonic()
    file = _opened(place) if place.rank == 0 else None
    number = _from_leader(-1 if file is None else file.number, device, collectives)
    if number < 0:
        return None, []
    if place.rank:
        file = _opened(place, number)
    file, mine = _read(place, file)
    kept = agreed(mine, place.num_slots, device, collectives)
    if mine:
        log.info(
            "kv_spill_recovered",
            blocks=len(kept),
            dropped=len(mine) - len(kept),
            bytes=len(kept) * place.block_bytes,
            seconds=round(time.monotonic() - began, 3),
        )
    return file, kept


def agreed(mine: list[KeptBlock], num_slots: int, device: torch.device, collectives: Collectives) -> list[KeptBlock]:
    """Those of `mine` that every rank has in the same slot."""
    if collectives.world_size == 1:
        return mine
    if not smallest((len(mine),), device, collectives)[0]:
        return []
    names = np.zeros((num_slots, _DIGEST_WORDS), np.int64)
    for block in mine:
        names[block.slot] = np.frombuffer(block.key.digest, np.int64)
    alike = np.zeros(num_slots, bool)
    for first in range(0, num_slots, _SLOTS_PER_SUM):
        own = torch.from_numpy(names[first : first + _SLOTS_PER_SUM]).to(device)
        leaders = own.clone() if collectives.rank == 0 else torch.zeros_like(own)
        differs = (collectives.all_reduce(leaders) != own).any(1).to(torch.float32)
        alike[first : first + len(own)] = (collectives.all_reduce(differs) == 0).cpu().numpy()
    return [block for block in mine if alike[block.slot]]


def _opened(place: SpillPlace, number: int | None = None) -> SpillFile | None:
    """Of `number`, or of one to be chosen. None, and said: it cannot be had."""
    reason = "another process uses them"
    try:
        file = take(place) if number is None else SpillFile.open(place, number)
    except OSError as error:
        file, reason = None, str(error)
    if file is None:
        _not_kept(place, reason)
    else:
        _remove_larger(place, file.number)
    return file


def _read(place: SpillPlace, file: SpillFile | None) -> tuple[SpillFile | None, list[KeptBlock]]:
    """`file` and what is in it. None, and said: it cannot be read."""
    if file is None:
        return None, []
    try:
        return file, file.read()
    except OSError as error:
        file.close()
        _not_kept(place, str(error))
        return None, []


def _not_kept(place: SpillPlace, reason: str) -> None:
    log.warning(
        "kv_spill_save_failed",
        directory=str(place.directory),
        reason=reason,
        effect="spilled KV blocks go with this ring",
    )


def _from_leader(value: int, device: torch.device, collectives: Collectives) -> int:
    told = torch.tensor([value if collectives.rank == 0 else 0], dtype=torch.int64, device=device)
    return int(collectives.all_reduce(told)[0])


def _remove_larger(place: SpillPlace, number: int) -> None:
    """Files of `number`, which is this ring's, that are of ranks which it has not."""
    for path in place.directory.glob(f"ryzanstein-kv-{number}-rank-*.index"):
        rank = path.stem.rpartition("-")[2]
        if not rank.isdecimal() or int(rank) < place.world_size:
            continue
        other = place._replace(rank=int(rank))
        if not _is_used(other, number):
            with contextlib.suppress(OSError):  # what cannot be removed only takes room
                for kind in ("index", "blocks"):
                    other.path(number, kind).unlink()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One leader at a time chooses."""
    fd = _open(directory / "ryzanstein-kv.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Nothing that is made here is garbage, and to look for some in ever more of it takes two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_used(place: SpillPlace, number: int) -> bool:
    """By another process, or it is not this user's."""
    try:
        fd = _open(place.path(number, "index"))
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _header(place: SpillPlace, number: int) -> bytes:
    with place.path(number, "index").open("rb") as file:
        return file.read(HEADER_BYTES)


def _open(path: Path) -> int:
    """A file of this user alone, to be read and written; made where it is not there. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is not a file of this user")
    return fd


def _write(fd: int, content: bytes, offset: int) -> None:
    if os.pwrite(fd, content, offset) != len(content):  # a full disk: the next attempt would say so
        raise OSError("the index was written in part")


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)

"""Restores of a plan: spilled blocks are read into the store's memory, without a copy between.

    restore      all blocks, in the order of their slots, which the disk has one behind the other
    beside       this thread      layer 0 │ layer 1 │ layer 2 │ ...      each waits for `ready` to pass it
                 reader       pages 0-3 of all blocks │ pages 4-7 │ ...

The reader brings the page layers in the order in which layers attend to them, as many at a time as make a read worth
its while: with small blocks all at once. Whether all blocks were there is known at the end alone: a step that has read
what was lost has computed with anything, and nobody uses its result. What is lost is zeros then.
"""

import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from services.executor.kv_cache.store import KvStore

log = structlog.get_logger(__name__)

# Of one block that are read at a time, at least: a disk reads whole blocks one behind the other several times as fast
# as parts of 64 KiB.
READ_BYTES = 256 << 10
# What is less of a page layer, as scales are, is read with the first of them, of all layers at once.
SMALL_BYTES = 4096
_MOST_ROOMS = os.sysconf("SC_IOV_MAX")
_ALL = 1 << 62

Part = tuple[int, NDArray[np.uint8]]  # see `KvStore.parts_of_pages`


class Slots(Protocol):
    """Spilled blocks that are read in parts."""

    def find(self, slot: int) -> bytes | int | None:
        """The bytes of a slot, or their checksum where they are to be read; None: they are lost."""
        ...

    def expect(self, slot: int, offset: int, size: int) -> None:
        """Has the system read that part of a slot ahead."""
        ...

    def read_into(self, slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        """Fills `rooms`, one behind the other, from byte `offset` of a slot on; whether it could."""
        ...


def in_order_of_use(pages_of_layers: Sequence[int], count: int) -> list[int]:
    """All of `count` page layers: those that no layer attends to first, so that whatever goes with a layer is there
    before it."""
    used = list(dict.fromkeys(pages_of_layers))
    return [page for page in range(count) if page not in set(used)] + used


def layers_ready(pages_of_layers: Sequence[int], there: set[int]) -> int:
    """How many layers, from the first on, have all their pages in `there`."""
    missing = (layer for layer, page in enumerate(pages_of_layers) if page not in there)
    return next(missing, _ALL)


def runs_of(parts: Sequence[Part]) -> list[list[Part]]:
    """`parts` that follow each other in a block, together, as many as one read takes."""
    runs: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: part[0]):
        if runs and _end(runs[-1]) == part[0] and len(runs[-1]) < _MOST_ROOMS:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _end(run: Sequence[Part]) -> int:
    offset, room = run[-1]
    end: int = offset + room.shape[1]
    return end


def restore(store: KvStore, slots: Slots, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Puts slots into blocks, (slot, block) each, and says of each whether it was there. The blocks are full ones in
    their last format."""
    blocks = _Blocks(store, slots, pairs)
    parts = list(chain.from_iterable(blocks.parts))
    blocks.bring(runs_of(parts))
    return blocks.settle()


class _Blocks:
    """Those that one plan restores."""

    def __init__(self, store: KvStore, slots: Slots, pairs: Sequence[tuple[int, int]]) -> None:
        self.parts = store.parts_of_pages()
        self._slots = slots
        self._count = len(pairs)
        first = store.first_whole
        self._rows = sorted((slot, block - first, row) for row, (slot, block) in enumerate(pairs))
        self._found = {row: slots.find(slot) for slot, _, row in self._rows}

    def bring(self, runs: Sequence[Sequence[Part]]) -> None:
        for slot, block, row in self._rows:
            content = self._found[row]
            if isinstance(content, bytes):
                _place(content, block, runs)
            elif content is not None and not self._read(slot, block, runs):
                self._found[row] = None

    def _read(self, slot: int, block: int, runs: Sequence[Sequence[Part]]) -> bool:
        return all(self._slots.read_into(slot, [room[block].data for _, room in run], run[0][0]) for run in runs)

    def expect(self, runs: Sequence[Sequence[Part]]) -> None:
        """Has the system read them ahead."""
        for slot, _, row in self._rows:
            if isinstance(self._found[row], int):
                for run in runs:
                    self._slots.expect(slot, run[0][0], _end(run) - run[0][0])

    def settle(self) -> list[bool]:
        """Of each pair whether its block is there, once all has been brought; one that is not is zeros."""
        there = [True] * self._count
        parts = sorted(chain.from_iterable(self.parts), key=lambda part: part[0])
        for _, block, row in self._rows:
            there[row] = _is_whole(self._found[row], [room[block].data for _, room in parts])
            if not there[row]:
                for _, room in parts:
                    room[block] = 0
        return there


def _place(content: bytes, block: int, runs: Sequence[Sequence[Part]]) -> None:
    whole = np.frombuffer(content, np.uint8)
    for offset, room in chain.from_iterable(runs):
        room[block] = whole[offset : offset + room.shape[1]]


def _is_whole(content: bytes | int | None, rooms: Sequence[memoryview]) -> bool:
    if isinstance(content, bytes):
        return len(content) == sum(map(len, rooms))
    checksum = 0
    for room in rooms if content is not None else ():
        checksum = zlib.crc32(room, checksum)
    return content == checksum


class LayeredRestore:
    """`restore` beside a step. Begins at once, in a thread of its own."""

    def __init__(
        self,
        store: KvStore,
        slots: Slots,
        pairs: Sequence[tuple[int, int]],
        pages_of_layers: Sequence[int],
        tick: Callable[[], None],
    ) -> None:
        """`pages_of_layers`: the page layer that each layer of the model attends to. `tick`: called as bytes
        arrive."""
        self._store, self._slots, self._tick = store, slots, tick
        self._pairs = list(pairs)
        self._pages_of_layers = list(pages_of_layers)
        self._ready = (ctypes.c_int64 * 1)()
        # Of each pair, once it is over: whether its block could not be brought.
        self.lost = [True] * len(self._pairs)
        self._thread = threading.Thread(target=self._run, name="restore KV blocks", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """Layers, from the first on, whose blocks are all there."""
        count: int = self._ready[0]
        return count

    @property
    def address(self) -> int:
        """Of that number, for native code."""
        return ctypes.addressof(self._ready)

    def join(self) -> None:
        """Waits until it is over."""
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            blocks = _Blocks(self._store, self._slots, self._pairs)
            self._bring(blocks)
            self.lost = [not there for there in blocks.settle()]
        except Exception as error:  # the step must not wait for ever
            log.exception("kv_restore_failed", exc_info=error)
        finally:
            self._ready[0] = _ALL

    def _bring(self, blocks: _Blocks) -> None:
        chunks, there = self._chunks(blocks.parts), set[int]()
        runs = self._runs_of_chunks(blocks.parts, chunks)
        for number, pages in enumerate(chunks):
            for later in runs[number + 1 : number + 2]:
                blocks.expect(later)
            blocks.bring(runs[number])
            there |= {*pages}
            self._ready[0] = layers_ready(self._pages_of_layers, there)
            self._tick()

    def _chunks(self, parts: Sequence[Sequence[Part]]) -> list[list[int]]:
        """All page layers, in turn."""
        order = in_order_of_use(self._pages_of_layers, len(parts))
        least = min(sum(room.shape[1] for _, room in parts[page]) for page in order)
        per = max(1, READ_BYTES // least)
        return [order[first : first + per] for first in range(0, len(order), per)]

    @staticmethod
    def _runs_of_chunks(parts: Sequence[Sequence[Part]], chunks: Sequence[Sequence[int]]) -> list[list[list[Part]]]:
        """What is read of each block for each of `chunks`."""
        small = [part for part in chain.from_iterable(parts) if part[1].shape[1] < SMALL_BYTES]
        large = [
            [part for page in pages for part in parts[page] if part[1].shape[1] >= SMALL_BYTES] for pages in chunks
        ]
        large[0] += small
        return [runs_of(each) for each in large]

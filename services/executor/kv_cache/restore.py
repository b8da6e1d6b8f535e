"""Restores of a plan beside its forward pass: layers are computed while blocks of later ones are still on their way.

    this thread      layer 0 │ layer 1 │ layer 2 │ ...      each waits for `ready` to pass it
    reader       pages 0-3 of all blocks │ pages 4-7 │ ...  then the checksums of what came from disk

The reader brings the page layers in the order in which layers attend to them, as many at a time as make a read worth
its while. Whether all blocks were there is known at the end alone: a step that has read what was lost has computed with
zeros, and nobody uses its result.
"""

import ctypes
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import torch

from services.executor.kv_cache.store import KvStore

log = structlog.get_logger(__name__)

READ_BYTES = 64 << 10
"""Of one block that are read at a time, at least: a disk takes as long for less."""
_ALL = 1 << 62


class Slots(Protocol):
    """Spilled blocks that are read in parts."""

    def find(self, slot: int) -> bytes | int | None:
        """The bytes of a slot, or their checksum where they are to be read; None: they are lost."""
        ...

    def expect(self, slot: int, offset: int, size: int) -> None:
        """Has the system read that part of a slot ahead."""
        ...

    def read_into(self, slot: int, room: memoryview, offset: int) -> bool:
        """Fills `room` from byte `offset` of a slot on; whether it could."""
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


class LayeredRestore:
    """The restores of one plan. Begins at once, in a thread of its own."""

    def __init__(
        self,
        store: KvStore,
        slots: Slots,
        pairs: Sequence[tuple[int, int]],
        pages_of_layers: Sequence[int],
        tick: Callable[[], None],
    ) -> None:
        """`pairs`: (slot, block) each; blocks are full ones in their last format. `pages_of_layers`: the page layer
        that each layer of the model attends to. `tick`: called as bytes arrive."""
        self._store, self._slots, self._tick = store, slots, tick
        self._pairs = list(pairs)
        self._pages_of_layers = list(pages_of_layers)
        self._extents = store.extents()
        self._ready = (ctypes.c_int64 * 1)()
        size = max(offset + size for extents in self._extents for offset, size in extents)
        self._packed = torch.zeros((len(self._pairs), size), dtype=torch.uint8)
        self._rows = [memoryview(row.numpy()) for row in self._packed]
        self._found: list[bytes | int | None] = []
        self.lost = [True] * len(self._pairs)
        """Of each pair, once it is over: whether its block could not be brought."""
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
            self._found = [self._slots.find(slot) for slot, _ in self._pairs]
            self._bring()
            self.lost = [not self._is_whole(row) for row in range(len(self._pairs))]
        except Exception as error:  # the step must not wait for ever
            log.exception("kv_restore_failed", exc_info=error)
        finally:
            self._ready[0] = _ALL

    def _bring(self) -> None:
        chunks, there = self._chunks(), set[int]()
        blocks = torch.tensor([block for _, block in self._pairs])
        for row, content in enumerate(self._found):
            if isinstance(content, bytes):
                self._rows[row][: len(content)] = content
        self._expect(chunks[0])
        for number, pages in enumerate(chunks):
            self._expect([page for later in chunks[number + 1 : number + 2] for page in later])
            for row in self._from_disk():
                self._read(row, pages)
            for page in pages:
                self._store.unpack_layer(page, blocks, self._packed)
            there |= {*pages}
            self._ready[0] = layers_ready(self._pages_of_layers, there)
            self._tick()

    def _chunks(self) -> list[list[int]]:
        """All page layers, in turn."""
        order = in_order_of_use(self._pages_of_layers, len(self._extents))
        least = min(sum(size for _, size in self._extents[page]) for page in order)
        per = max(1, READ_BYTES // least)
        return [order[first : first + per] for first in range(0, len(order), per)]

    def _from_disk(self) -> list[int]:
        return [row for row, content in enumerate(self._found) if isinstance(content, int)]

    def _parts(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """The bytes of a block that are these page layers', (offset, size) each, joined where they can be."""
        parts: list[tuple[int, int]] = []
        for offset, size in sorted(extent for page in pages for extent in self._extents[page]):
            if parts and sum(parts[-1]) == offset:
                parts[-1] = (parts[-1][0], parts[-1][1] + size)
            else:
                parts.append((offset, size))
        return parts

    def _expect(self, pages: Sequence[int]) -> None:
        for row in self._from_disk():
            for offset, size in self._parts(pages):
                self._slots.expect(self._pairs[row][0], offset, size)

    def _read(self, row: int, pages: Sequence[int]) -> None:
        for offset, size in self._parts(pages):
            if not self._slots.read_into(
                self._pairs[row][0], self._rows[row][offset : offset + size], offset
            ):
                self._found[row] = None
                return

    def _is_whole(self, row: int) -> bool:
        content = self._found[row]
        return content is not None and (isinstance(content, bytes) or zlib.crc32(self._rows[row]) == content)

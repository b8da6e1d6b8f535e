"""Memory of a GPU, as far as a kernel was given some."""

from typing import Any

import numpy as np

from tests.unit.executor.gpu.kernels.ptx.lanes import Array


class Memory:
    """Pieces at addresses. Any address may be chosen, so that a store of 120 GB takes no more than what is touched."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[Array] = []
        self._next = 0x7F0000000000

    def give(self, array: np.ndarray[Any, Any], at: int | None = None) -> int:
        """Has `array`, contiguous, lie `at` an address, which is returned; its numbers change as kernels write."""
        assert array.flags.c_contiguous
        address = self._next if at is None else at
        if at is None:
            self._next += (array.nbytes + 0x2000) & ~0xFFF  # what is beside it is nobody's
        self._starts.append(address)
        self._pieces.append(array.reshape(-1).view(np.uint8))
        order = np.argsort(np.array(self._starts, np.uint64), kind="stable")
        self._starts = [self._starts[at] for at in order]
        self._pieces = [self._pieces[at] for at in order]
        return address

    def load(self, addresses: Array, size: int) -> Array:
        """uint8 [threads, size]"""
        found = np.empty((len(addresses), size), np.uint8)
        for piece, mine, places in self._places(addresses, size):
            found[mine] = piece[places]
        return found

    def store(self, addresses: Array, data: Array) -> None:
        """`data` uint8 [threads, size]"""
        for piece, mine, places in self._places(addresses, data.shape[1]):
            piece[places] = data[mine]

    def _places(self, addresses: Array, size: int) -> Any:
        """(a piece, which threads want it, the places of their bytes in it)"""
        if not len(addresses):
            return
        assert not (addresses % np.uint64(size)).any(), (
            f"{size} bytes at an address that does not divide by them"
        )
        which = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right") - 1
        for one in np.unique(which):
            mine = np.flatnonzero(which == one)
            offsets = addresses[mine].astype(np.int64) - self._starts[one]
            piece = self._pieces[one]
            outside = (one < 0) | (offsets + size > len(piece))
            assert not outside.any(), f"address {int(addresses[mine][0]):#x} belongs to no tensor"
            yield piece, mine, offsets[:, None] + np.arange(size)

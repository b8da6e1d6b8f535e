"""Weights beyond `weights_memory`: some layers stay in memory, the others are read from their mapped file in each step.

    layers    0 ██  1 ██  2 ░░  3 ██  4 ██  5 ░░ ...     ██ in memory for good   ░░ streamed
    step      computes 2 │ reads 5 meanwhile │ has given back what came before 2

Every step passes through all layers in their order, so keeping those that were used last would keep none of use. Which
ones stay is decided once; the streamed ones lie evenly among them: the disk works while the others are computed.
A streamed layer's bytes are the pages of the file itself: what a reader thread has not brought by then comes with a
page fault, so the thread decides nothing but the time. Of a mixture of experts, the thread brings what every row needs,
and the kernels ask for the experts that were chosen (`native/experts.c`).
"""

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
from torch import Tensor

from services.executor.core.progress import ProgressCounter
from services.executor.native.library import RzPlace
from shared.errors import ConfigurationError
from shared.messages import StreamedWeights

log = structlog.get_logger(__name__)

PIECE = 8 << 20  # bytes that are read before it is looked whether they are still of use
_ASKED_AT_ONCE = 128 << 10  # bytes: of a larger request Linux reads no more than a device's read-ahead
_NEAR = 64 << 10  # bytes between two extents that are worth less than a request
_MEASURED_BYTES, _MEASURED_SECONDS = 256 << 20, 0.25  # of the disk's rate, at most
_PATIENCE = 2.0  # seconds for the thread to end
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14


class Extent(NamedTuple):
    """Some bytes of the file."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class LayerExtents(NamedTuple):
    """Where a layer's weights are."""

    dense: list[Extent]  # what every row is multiplied with
    routed: list[Extent]  # all experts
    chosen: float = 0.0  # share of them that one row is multiplied with

    @property
    def ahead(self) -> int:
        """Bytes that are read before the layer is computed."""
        return sum(extent.size for extent in self.dense)

    @property
    def size(self) -> int:
        return self.ahead + sum(extent.size for extent in self.routed)

    @property
    def per_row(self) -> float:
        """Bytes that a step of one row reads."""
        return self.ahead + self.chosen * (self.size - self.ahead)


class Residency(NamedTuple):
    """Which layers of a rank are streamed, and what it takes, in bytes."""

    streamed: tuple[int, ...]
    memory: int  # at most: what stays, the streamed layer that is computed, and the one that is read ahead
    per_step: int  # read from the file for a step of one row


def plan_residency(layers: Sequence[LayerExtents], fixed: int, budget: int) -> Residency:
    """As few streamed layers as `budget` bytes allow, of `layers` and `fixed` bytes that always stay. Pure.

    Raises `ConfigurationError` where even one layer after the other does not fit.
    """
    count, least = len(layers), math.inf
    for number in range(count + 1):
        streamed = tuple(at for at in range(count) if (at + 1) * number // count > at * number // count)
        window = _window([layers[at] for at in streamed])
        memory = fixed + sum(layers[at].size for at in range(count) if at not in streamed) + window
        if memory <= budget:
            return Residency(streamed, memory, round(sum(layers[at].per_row for at in streamed)))
        least = min(least, memory)
    raise ConfigurationError(
        f"RYZANSTEIN_WEIGHTS_MEMORY is {budget} bytes, and a rank of this model needs {least} at least: {fixed} for "
        f"embedding, head and norms, and {least - fixed} for the layer that is computed and the one that is read "
        "meanwhile; set it to that or more, or to 0 for all weights in memory."
    )


def _window(streamed: Sequence[LayerExtents]) -> int:
    """Bytes of the layer that is computed and of what is read ahead meanwhile, at most."""
    if len(streamed) < 3:  # none is ever given back: each is the next one
        return sum(layer.size for layer in streamed)
    following = [*streamed[1:], streamed[0]]
    return max(now.size + coming.ahead for now, coming in zip(streamed, following, strict=True))


def joined(extents: Sequence[Extent]) -> list[Extent]:
    """The same bytes, in order, with small gaps between them."""
    found: list[Extent] = []
    for extent in sorted(extents):
        if found and extent.offset - found[-1].end <= _NEAR:
            found[-1] = Extent(found[-1].offset, max(found[-1].end, extent.end) - found[-1].offset)
        else:
            found.append(extent)
    return found


def pieces_of(extents: Sequence[Extent]) -> list[Extent]:
    """The same bytes in pieces of whole pages, `PIECE` each at most; pages at their borders may be others' too."""
    pieces = []
    for extent in extents:
        begin = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        pieces += [Extent(at, min(PIECE, extent.end - at)) for at in range(begin, extent.end, PIECE)]
    return pieces


class WeightStreamer:
    """Reads a rank's streamed layers ahead of its steps, and gives them back behind it, in a thread of its own."""

    def __init__(
        self, pages: Tensor, fd: int, layers: Mapping[int, LayerExtents], count: int, weights: StreamedWeights
    ) -> None:
        """`pages`: uint8, the mapped file `fd` from its beginning; it is never written to. `layers`: those that are
        streamed, of `count`."""
        self.weights = weights
        self._pages = pages
        self._fd = os.dup(fd)
        self._numbers = sorted(layers)
        self._count = count
        self._dense = {number: pieces_of(layer.dense) for number, layer in layers.items()}
        self._every = {number: joined([*layer.dense, *layer.routed]) for number, layer in layers.items()}
        self._done: dict[int, int] = {}  # of the layers that are held: how many pieces of them have been read
        self._doorbell = os.eventfd(1, os.EFD_CLOEXEC)  # rung: the first step is read ahead as well
        self.place = RzPlace(0, self._doorbell)  # where the step is: the kernels write it
        # Of the step under way: what is read counts, so that a slow disk is not taken for a rank that hangs.
        self.progress = ProgressCounter.unread()
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._rounds, self._looked = 0, threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="read weights", daemon=True)
        self._thread.start()

    @property
    def layers(self) -> frozenset[int]:
        """Those that are streamed."""
        return frozenset(self._numbers)

    @property
    def address(self) -> int:
        """Of the mapped file."""
        return self._pages.data_ptr()

    @property
    def resident(self) -> frozenset[int]:
        """Streamed layers that are in memory, as a whole or in part."""
        return frozenset(self._done)

    def settle(self) -> None:
        """Waits until what is wanted has been read, and all else given back. To be called between steps."""
        for _ in range(2):  # what was under way may have begun before
            with self._looked:
                rounds = self._rounds
                os.eventfd_write(self._doorbell, 1)
                self._looked.wait_for(lambda: self._rounds > rounds)  # noqa: B023 - it is called at once

    def prefetch_order(self, layer: int) -> tuple[int, ...]:
        """Streamed layers that are to be in memory, the most urgent first, while `layer` is computed."""
        coming = [number for number in self._numbers if number >= layer] + self._numbers
        return tuple(dict.fromkeys(coming[:2]))

    def close(self) -> None:
        """Ends the thread. Safe to call twice; to be called before the last of `pages` goes."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._doorbell, 1)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            return  # a disk that gives nothing, or an interpreter that ends: the process takes it along
        os.close(self._doorbell)
        os.close(self._fd)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            moves = os.eventfd_read(self._doorbell)
            layer = self.place.layer
            wanted = self.prefetch_order(layer)
            # Of a layer that was passed before it was looked at pages may be there that a fault has brought.
            passed = {(layer - back) % (self._count + 1) for back in range(min(moves, self._count) + 1)}
            for held in ({*self._numbers} & passed | self._done.keys()) - {*wanted}:
                self._give_back(held)
            for number in wanted:
                if not self._read(number, layer):
                    break  # the step has gone on: the bell was rung again
            with self._looked:
                self._rounds += 1
                self._looked.notify_all()

    def _read(self, number: int, layer: int) -> bool:
        """Reads what is missing of a streamed layer, as long as `layer` is computed; whether that was all."""
        pieces = self._dense[number]
        begin = self._done.setdefault(number, 0)
        for at in range(begin, len(pieces)):
            if self._closed or self.place.layer != layer:
                return False
            for coming in pieces[at : at + 2] if at == begin else pieces[at + 1 : at + 2]:
                self._ask_for(coming)
            # Waits for them. An older system does not know it: what asks for a page waits for it then.
            self._madvise(self.address + pieces[at].offset, pieces[at].size, _POPULATE_READ)
            self._done[number] = at + 1
            self.progress.tick()
        return True

    def _ask_for(self, piece: Extent) -> None:
        for at in range(piece.offset, piece.end, _ASKED_AT_ONCE):
            size = min(_ASKED_AT_ONCE, piece.end - at)
            with contextlib.suppress(OSError):  # it is advice
                os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_WILLNEED)

    def _give_back(self, number: int) -> None:
        """To the system: a page cache full of weights that were just used would cost others theirs."""
        for extent in self._every[number]:
            begin = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._madvise(self.address + begin, extent.end - begin, mmap.MADV_DONTNEED)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, begin, extent.end - begin, os.POSIX_FADV_DONTNEED)
        self._done.pop(number, None)


def measure_rate(fd: int, extents: Sequence[Extent]) -> float:
    """Bytes a second at which the disk gives `extents` of the file `fd`, or as many of them as it takes to tell; 0: it
    could not be measured."""
    with mmap.mmap(-1, PIECE) as room, memoryview(room) as into:
        for flags in (os.O_DIRECT, 0):
            with contextlib.suppress(OSError):  # a file system that does not read past its cache
                return _measured(fd, flags, extents, into)
    return 0.0


def _measured(fd: int, flags: int, extents: Sequence[Extent], into: memoryview) -> float:
    file = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        done, spent, began = 0, 0.0, time.perf_counter()
        for offset, size in pieces_of(extents):
            whole = size // mmap.PAGESIZE * mmap.PAGESIZE
            if not flags:
                os.posix_fadvise(file, offset, whole, os.POSIX_FADV_DONTNEED)
            done += os.preadv(file, [into[:whole]], offset)
            spent = time.perf_counter() - began
            if done >= _MEASURED_BYTES or spent >= _MEASURED_SECONDS:
                break
        return done / spent if spent else 0.0
    finally:
        os.close(file)

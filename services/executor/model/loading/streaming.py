"""Reads tensors from files straight to a device: several lanes, each a thread with buffers that the device copies from.

    pieces, in order ─▶ lane 0   file ─▶ buffer 0 ─┐ ┌─▶ stream 0 ─▶ the tensor itself, cast there if it must be
                                 file ─▶ buffer 1 ─┴─┘              └▶ codes and scales, where it is to be quantised
                        lane 1   ...

While the device takes one buffer of a lane, its thread fills the other. Nothing holds a whole tensor but its place on
the device; a weight that is quantised is not even there whole before, since its rows are encoded piece by piece.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from services.executor.model.loading.composition import TensorBox
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.quantized import QuantizedRows
from services.executor.model.weight_formats import Quantized, WeightCodec, encode_into
from services.executor.platforms.base import Carrier, Fence, Target

# Bytes of a buffer. The device takes it in 0.15 ms at 55 GB/s, a thread fills it in 1 ms, and the interpreter's work
# for it is less than a tenth of that; pinning the buffers of all lanes takes some 60 ms.
PIECE = 8 << 20
BUFFERS = 2  # of a lane
LANES = 12  # one thread copies 5 to 10 GB/s out of the page cache, a bus of PCIe 5 takes 55


def put(place: Tensor, staged: Tensor) -> None:
    """A `Target`: part of a plain tensor."""
    if staged.dtype == place.dtype and place.is_contiguous():
        place.copy_(staged, non_blocking=True)
    else:
        # Cast on the device: torch would cast on the host, and wait for it.
        place.copy_(staged.to(place.device, non_blocking=True))


def put_coded(room: Quantized | QuantizedRows, codec: WeightCodec, dtype: torch.dtype, staged: Tensor) -> None:
    """A `Target`: rows of a weight that is quantised from what it is in `dtype`."""
    rows = staged.to(room.codes.device, non_blocking=True).to(dtype)
    encode_into(room, rows, codec)


class TransferPiece(NamedTuple):
    """What goes through a buffer at once."""

    source: str
    stored: Tensor  # part of the checkpoint's tensor `source`, over the bytes of its file
    target: Target
    nbytes: int  # what it counts for in progress


def carry_all(
    pieces: Iterator[TransferPiece],
    files: WeightFiles,
    make_carrier: Callable[[], Carrier],
    on_bytes: Callable[[int], None],
    lanes: int,
) -> None:
    """Brings all of `pieces` to their places, which have arrived when this returns.

    `on_bytes` is called by one thread at a time. The first error of a lane ends all of them and is raised.
    """
    shared = _Shared(pieces, on_bytes)
    with ThreadPoolExecutor(lanes, thread_name_prefix="load") as pool:
        running = [pool.submit(_run_lane, shared, files, make_carrier) for _ in range(lanes)]
        errors = [error for lane in running if (error := lane.exception()) is not None]
    if errors:
        raise shared.error or errors[0]


def lanes_here() -> int:
    """As many as this process has cores for."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else LANES))


class _Shared:
    def __init__(self, pieces: Iterator[TransferPiece], on_bytes: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self.error: BaseException | None = None  # the first

    def next(self) -> TransferPiece | None:
        """None: there are no more, or some lane has failed."""
        with self._lock:
            return None if self.error else next(self._pieces, None)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._on_bytes(nbytes)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error


def _run_lane(shared: _Shared, files: WeightFiles, make_carrier: Callable[[], Carrier]) -> None:
    fences: list[Fence] = []
    try:
        carrier = make_carrier()
        buffers = [carrier.buffer(PIECE) for _ in range(BUFFERS)]
        while (piece := shared.next()) is not None:
            if len(fences) == BUFFERS:
                fences.pop(0)()
            buffer = buffers.pop(0)
            buffers.append(buffer)
            staged = buffer[: piece.stored.nbytes].view(piece.stored.dtype).view(piece.stored.shape)
            files.copy(piece.source, piece.stored, staged)
            fences.append(carrier.send(piece.target, staged))
            shared.count(piece.nbytes)
    except BaseException as error:
        shared.fail(error)
        raise
    finally:
        # The buffers go with this function, so the device must be done with them.
        for fence in fences:
            fence()


def pieces_of(part: TensorBox, files: WeightFiles, held: Tensor, itemsize: int) -> Iterator[TransferPiece]:
    """Of `part`, whose place is in the plain tensor `held`; `itemsize` is what its values count for."""
    stored, place = part.view(files.tensor(part.source)), part.place(held)
    for box in boxes(tuple(stored.shape), stored.element_size(), PIECE):
        some = stored[box]
        yield TransferPiece(part.source, some, partial(put, place[box]), some.numel() * itemsize)


def coded_pieces_of(
    part: TensorBox, files: WeightFiles, held: Quantized | QuantizedRows, codec: WeightCodec, dtype: torch.dtype
) -> Iterator[TransferPiece]:
    """Of `part`, whole rows of a weight [out, in] that is quantised to `held` from what it is in `dtype`."""
    stored = part.view(files.tensor(part.source))
    step = max(1, PIECE // max(1, stored.shape[1] * stored.element_size()))
    for first in range(0, len(stored), step):
        some = stored[first : first + step]
        room = held.rows(part.at[0] + first, part.at[0] + first + len(some))
        yield TransferPiece(part.source, some, partial(put_coded, room, codec, dtype), some.numel() * dtype.itemsize)


_WIDEST = 8  # bytes of a value, in any checkpoint


def can_encode_by_rows(parts: Sequence[TensorBox], shape: tuple[int, ...]) -> bool:
    """Whether `parts` have whole rows of a weight of `shape`, each of which fits a buffer."""
    return shape[1] * _WIDEST <= PIECE and all(part.size[1] == shape[1] for part in parts)


def boxes(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Indices of boxes of at most `most` bytes, a number at least, that cover a tensor of `shape` once."""
    total = torch.Size(shape).numel() * itemsize
    if total <= most or not shape:
        yield (slice(None),) * len(shape)
        return
    row = total // shape[0]
    step = max(1, most // row)
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        if row <= most:
            yield (rows, *(slice(None),) * (len(shape) - 1))
        else:
            yield from ((rows, *rest) for rest in boxes(shape[1:], itemsize, most))

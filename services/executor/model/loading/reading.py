"""Copies a rank's share of a checkpoint into memory.

Each parameter is copied straight from the mapped files to its final place, cast on the way. Torch spreads
a copy over the threads it was given. The pages of the files that have been read are let go as it goes, so
a rank never holds more than its share and the one piece being copied. To a GPU, and where weights are quantised, pieces
go through the buffers of `streaming.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.executor.model.loading import streaming
from services.executor.model.loading.arena import allocate
from services.executor.model.loading.composition import Composition
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.weight_formats import Weight, WeightCodec, empty, quantize

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of this rank's share."""

_PIECE = 32 << 20
"""Bytes copied at once."""
_REPORTS = 200
"""Progress is told about so many times, however many tensors there are."""


@dataclass(frozen=True)
class Read:
    """One tensor to be made: this rank's share of a parameter."""

    content: Composition
    dtype: torch.dtype
    codec: WeightCodec | None = None
    """Of a weight [out, in] that is quantised from what it is in `dtype`."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.content.shape).numel() * self.dtype.itemsize


def read_all(
    reads: Sequence[Read], files: WeightFiles, device: torch.device, progress: Progress
) -> list[Weight]:
    """The tensors that `reads` describe, on `device`, in that order; those with a codec quantised."""
    if device.type == "cpu" and not any(read.codec for read in reads):
        return [*_read_to_host(reads, files, device, progress)]
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread, not of those that copy
    make = streaming.HostCarrier if device.type == "cpu" else partial(streaming.CudaCarrier, device)
    return stream_all(reads, files, device, progress, make, streaming.lanes_here())


def stream_all(
    reads: Sequence[Read],
    files: WeightFiles,
    device: torch.device,
    progress: Progress,
    make_carrier: Callable[[], streaming.Carrier],
    lanes: int,
) -> list[Weight]:
    """`read_all` by `lanes` threads, through what `make_carrier` makes for each."""
    held = [_room(read, device) for read in reads]
    meter = Meter(progress, sum(read.nbytes for read in reads))
    pieces = (piece for read, into in zip(reads, held, strict=True) for piece in _streamed(read, into, files))
    streaming.carry_all(pieces, files, make_carrier, meter.add, lanes)
    if device.type == "cuda":
        # torch keeps pinned memory for later, which nobody will ask for in such pieces.
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # noqa: SLF001  # no public name
    for index, read in enumerate(reads):
        into = held[index]
        if read.codec is not None and isinstance(into, Tensor):
            held[index] = quantize(into, read.codec)
    meter.finish()
    return held


def _room(read: Read, device: torch.device) -> Weight:
    """Where `read` goes; plain at first where its rows do not come whole."""
    shape = read.content.shape
    # No checkpoint has values of more than eight bytes.
    if read.codec is not None and streaming.can_encode_by_rows(read.content.parts, shape, 8):
        return empty(shape, read.codec, device)
    return torch.empty(shape, dtype=read.dtype, device=device)


def _streamed(read: Read, into: Weight, files: WeightFiles) -> Iterator[streaming.Piece]:
    for part in read.content.parts:
        if not isinstance(into, Tensor):
            assert read.codec is not None, "only a weight with a codec is quantised"
            yield from streaming.coded_pieces_of(part, files, into, read.codec, read.dtype)
        else:
            yield from streaming.pieces_of(part, files, into, read.dtype.itemsize)


def _read_to_host(
    reads: Sequence[Read], files: WeightFiles, device: torch.device, progress: Progress
) -> list[Tensor]:
    held = allocate([(read.content.shape, read.dtype) for read in reads], device)
    meter = Meter(progress, sum(read.nbytes for read in reads))
    with torch.no_grad():
        for read, tensor in zip(reads, held, strict=True):
            for part in read.content.parts:
                whole = part.view(files.tensor(part.source))
                for stored, place in _pieces(whole, part.place(tensor)):
                    place.copy_(stored)
                    files.release(part.source, stored)
                    meter.add(place.numel() * read.dtype.itemsize)
    meter.finish()
    return held


def _pieces(stored: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`stored` and its `place` in pieces of rows, so that little of a large tensor is held twice."""
    if stored.dim() == 0 or stored.nbytes <= _PIECE:
        yield stored, place
        return
    rows = max(1, _PIECE * stored.shape[0] // stored.nbytes)
    for start in range(0, stored.shape[0], rows):
        yield stored[start : start + rows], place[start : start + rows]


class Meter:
    """Tells `progress` about bytes as they are done, but not about each of thousands of tensors."""

    def __init__(self, progress: Progress, total: int) -> None:
        """`total` bytes are to come."""
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0
        progress(0, total)

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        if self._done < self._total and self._done - self._told >= self._total / _REPORTS:
            self._told = self._done
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self._progress(self._total, self._total)

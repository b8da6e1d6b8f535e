"""Copies a rank's share of a checkpoint into memory.

Each parameter is copied straight from the mapped files to its final place, cast on the way. Torch spreads
a copy over the threads it was given. The pages of the files that have been read are let go as it goes, so
a rank never holds more than its share and the one piece being copied. To a GPU, and where weights are quantised, pieces
go through the buffers of `streaming.py`.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import torch
from torch import Tensor

from services.executor.core.sharding import ShardRange
from services.executor.model.loading import streaming
from services.executor.model.loading.arena import allocate
from services.executor.model.loading.composition import Composition, TensorBox
from services.executor.model.loading.quantization_schemes import unreadable
from services.executor.model.loading.quantized_tensors import CodedTensor
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.weight_formats import Quantized, Weight, WeightCodec, empty, quantize
from services.executor.platforms.base import Carrier
from services.executor.platforms.catalog import platform_of

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all) of this rank's share

_PIECE = 32 << 20  # bytes copied at once
_UNPACKED = 1 << 23  # values that are unpacked at once
_REPORTS = 200  # progress is told about so many times, however many tensors there are


@dataclass(frozen=True)
class Read:
    """One tensor to be made: this rank's share of a parameter."""

    content: Composition
    dtype: torch.dtype
    codec: WeightCodec | None = None  # of a weight [out, in] that is quantised from what it is in `dtype`
    keeps_codes: bool = False  # whether a weight [out, in] stays quantized where the files have it so
    defers: bool = False  # whether codes that are kept may be read when they are packed

    @property
    def nbytes(self) -> int:
        return torch.Size(self.content.shape).numel() * self.dtype.itemsize

    @property
    def least_bytes(self) -> int:
        """That the tensor takes in memory at least: quantized ones may have two bits for a value."""
        if self.codec is None and not self.keeps_codes:
            return self.nbytes
        return torch.Size(self.content.shape).numel() // 4


def read_all(reads: Sequence[Read], files: WeightFiles, device: torch.device, progress: Progress) -> list[Weight]:
    """The tensors that `reads` describe, on `device`, in that order; those with a codec quantised.

    Those that defer their codes keep the files mapped, each until it is let go.
    Raises `ModelLoadError` where the files cannot be read or hold codes that make no sense.
    """
    meter = ReadMeter(progress, sum(read.nbytes for read in reads))
    coded = [any(part.source in files.coded for part in read.content.parts) for read in reads]
    of_codes, plain = ([read for read, one in zip(reads, coded, strict=True) if one is kind] for kind in (True, False))
    first, rest = iter(_read_coded(of_codes, files, device, meter)), iter(_read_plain(plain, files, device, meter))
    held = [next(first if is_one else rest) for is_one in coded]
    if not any(isinstance(weight, DeferredRows) for weight in held):
        meter.finish()
    return held


def _read_plain(reads: Sequence[Read], files: WeightFiles, device: torch.device, meter: "ReadMeter") -> list[Weight]:
    platform = platform_of(device)
    if platform.is_host and not any(read.codec for read in reads):
        return [*_read_to_host(reads, files, device, meter)]
    return stream_all(reads, files, device, meter, platform.carriers(device), streaming.lanes_here())


def stream_all(
    reads: Sequence[Read],
    files: WeightFiles,
    device: torch.device,
    meter: "ReadMeter",
    make_carrier: Callable[[], Carrier],
    lanes: int,
) -> list[Weight]:
    """`read_all` by `lanes` threads, through what `make_carrier` makes for each."""
    rooms = [_room(read, device) for read in reads]
    pieces = (piece for read, into in zip(reads, rooms, strict=True) for piece in _streamed(read, into, files))
    streaming.carry_all(pieces, files, make_carrier, meter.add, lanes)
    platform_of(device).free_buffers()
    held: list[Weight] = [*rooms]
    rooms.clear()
    for index, read in enumerate(reads):
        into = held[index]
        if read.codec is not None and isinstance(into, Tensor):
            held[index] = quantize(into, read.codec)
    return held


def _room(read: Read, device: torch.device) -> Tensor | Quantized | QuantizedRows:
    """Where `read` goes; plain at first where its rows do not come whole."""
    shape = read.content.shape
    if read.codec is not None and streaming.can_encode_by_rows(read.content.parts, shape):
        return empty(shape, read.codec, device)
    return torch.empty(shape, dtype=read.dtype, device=device)


def _streamed(
    read: Read, into: Tensor | Quantized | QuantizedRows, files: WeightFiles
) -> Iterator[streaming.TransferPiece]:
    for part in read.content.parts:
        if not isinstance(into, Tensor):
            assert read.codec is not None, "only a weight with a codec is quantised"
            yield from streaming.coded_pieces_of(part, files, into, read.codec, read.dtype)
        else:
            yield from streaming.pieces_of(part, files, into, read.dtype.itemsize)


def _read_coded(reads: Sequence[Read], files: WeightFiles, device: torch.device, meter: "ReadMeter") -> list[Weight]:
    """Of which some part is coded: as codes where they may stay codes and fit, else as the values they stand for."""
    held: list[Weight] = []
    unpacked: dict[str, int] = {}
    for read in reads:
        sources = list(dict.fromkeys(part.source for part in read.content.parts))
        deferred = _deferred(read, files, meter) if read.keeps_codes and read.defers else None
        if deferred is not None and not _not_there(deferred.like, device):
            held.append(deferred)
            continue
        codes = _codes(read, files.coded) if read.keeps_codes else None
        if codes is not None and _not_there(codes, device):
            codes = None
        held.append(_values(read, files).to(device) if codes is None else codes)
        if codes is None:
            kind = re.sub(r"\.\d+\.", ".*.", sources[0])
            unpacked[kind] = unpacked.get(kind, 0) + 1
        for source in sources:
            if source in files.coded:
                files.release_coded(source)
        meter.add(read.nbytes)
    if unpacked:
        log.info("weights_unpacked", reason="no product takes these codes here", tensors=unpacked)
    return held


def _not_there(codes: QuantizedRows, device: torch.device) -> bool:
    return bool(codes.floats) and not platform_of(device).multiplies_float_codes


def _deferred(read: Read, files: WeightFiles, meter: "ReadMeter") -> DeferredRows | None:
    """None where `_codes` would be none."""
    coded, sources = files.coded, sorted({part.source for part in read.content.parts})
    release = [files.releaser(source) for source in sources]

    def rows(first: int, end: int) -> Read:
        return replace(read, content=read.content.selected(0, [ShardRange(first, end)]))

    def codes_of(first: int, end: int) -> QuantizedRows | None:
        codes = _codes(rows(first, end), coded)
        for let_go in release:
            let_go()
        return codes

    def reader(first: int, end: int) -> QuantizedRows:
        codes = codes_of(first, end)
        assert codes is not None, "the first rows are of one format"
        meter.add(rows(first, end).nbytes)
        return codes

    firsts = [codes_of(part.at[0], part.at[0] + 1) for part in read.content.parts]
    like = firsts[0]
    if like is None or not all(one is not None and like.same_format(one) for one in firsts):
        return None
    return DeferredRows(like, 0, read.content.shape[0], reader)


def _codes(read: Read, coded_tensors: Mapping[str, CodedTensor]) -> QuantizedRows | None:
    """None where they are not one weight's rows, of one format, one after the other."""
    rows: list[QuantizedRows] = []
    for part in sorted(read.content.parts, key=lambda part: part.at):
        coded = coded_tensors.get(part.source)
        if coded is None or part.axes != (0, 1) or part.size[1] != read.content.shape[1]:
            return None
        spans = [ShardRange(start, start + size) for start, size in zip(part.origin, part.size, strict=True)]
        try:
            some = (coded if part.matrix is None else coded.matrix(part.matrix)).rows(*spans)
        except ValueError as error:
            raise unreadable(part.source, error) from error
        if some is None or (rows and not rows[0].same_format(some)):
            return None
        rows.append(some)
    return rows[0] if len(rows) == 1 else QuantizedRows.joined(rows)


def _values(read: Read, files: WeightFiles) -> Tensor:
    shape = read.content.shape
    made = torch.empty(shape, dtype=read.dtype)
    step = max(1, _UNPACKED * shape[0] // max(1, made.numel()))
    for first in range(0, shape[0], step):
        span = ShardRange(first, min(first + step, shape[0]))
        for part in read.content.parts:
            if (some := part.cut(0, span)) is not None:
                some.place(made[span.start : span.stop]).copy_(_unpacked(some, files))
    return made


def _unpacked(part: TensorBox, files: WeightFiles) -> Tensor:
    """The values of `part`, of its size."""
    coded = files.coded.get(part.source)
    if coded is None:
        return part.view(files.tensor(part.source))
    spans = zip(part.axes, part.origin, part.size, strict=True)
    box = {axis: slice(start, start + size) for axis, start, size in spans if axis is not None}
    matrix = [] if part.matrix is None else [slice(part.matrix, part.matrix + 1)]
    try:
        values = coded.values((*matrix, *(box[axis] for axis in range(len(box)))))
    except ValueError as error:
        raise unreadable(part.source, error) from error
    values = values[0] if matrix else values
    return values.permute([axis for axis in part.axes if axis is not None]).reshape(part.size)


def _read_to_host(reads: Sequence[Read], files: WeightFiles, device: torch.device, meter: "ReadMeter") -> list[Tensor]:
    held = allocate([(read.content.shape, read.dtype) for read in reads], device)
    with torch.no_grad():
        for read, tensor in zip(reads, held, strict=True):
            for part in read.content.parts:
                whole = part.view(files.tensor(part.source))
                for stored, place in _pieces(whole, part.place(tensor)):
                    place.copy_(stored)
                    files.release(part.source, stored)
                    meter.add(place.numel() * read.dtype.itemsize)
    return held


def _pieces(stored: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`stored` and its `place` in pieces of rows, so that little of a large tensor is held twice."""
    if stored.dim() == 0 or stored.nbytes <= _PIECE:
        yield stored, place
        return
    rows = max(1, _PIECE * stored.shape[0] // stored.nbytes)
    for start in range(0, stored.shape[0], rows):
        yield stored[start : start + rows], place[start : start + rows]


class ReadMeter:
    """Tells `progress` about bytes as they are done, but not about each of thousands of tensors."""

    def __init__(self, progress: Progress, total: int) -> None:
        """`total` bytes are to come."""
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0
        self._lock = threading.Lock()  # several threads pack
        progress(0, total)

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        with self._lock:
            self._done += count
            if self._done - self._told >= self._total / _REPORTS and self._told < self._total:
                self._told = min(self._done, self._total)
                self._progress(self._told, self._total)

    def finish(self) -> None:
        """All are done."""
        if self._told < self._total:
            self._progress(self._total, self._total)

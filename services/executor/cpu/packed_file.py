"""A packed model in a file, so that a later start reads what it would have to build, and needs no modelling code.

    the tensors' bytes, each from a multiple of 64 │ header: MessagePack │ 24 bytes: magic, header's length, its CRC-32

The header has a CRC-32 for each piece of the bytes before it, so a damaged file is never computed with. To serve, the
bytes are read into huge pages and not mapped: decoding, which streams through all of them, takes about a fifth longer
from the page cache's small pages. A trainer, which unpacks each weight for thousands of rows, maps them. So does a rank
with less memory than they take (`weight_streaming.py`).
"""

import math
import mmap
import os
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import msgspec
import torch
from torch import Tensor

from services.executor.cpu.packed_linear import PackedLinear
from services.executor.cpu.packed_model import PackedModel
from services.executor.cpu.weight_streaming import (
    Extent,
    LayerExtents,
    WeightStreamer,
    joined,
    measure_rate,
    plan_residency,
)
from services.executor.model.loading.arena import NO_RESERVE, fresh
from services.executor.model.model_facts import ModelFacts
from shared.messages import StreamedWeights

_MAGIC = b"RYZPACK1"
_TRAILER = struct.Struct("<8sQQ")
_ALIGNMENT = 64
_PIECE = 8 << 20  # bytes under one checksum: what a thread reads at once
_DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int32": torch.int32}

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all)


class Damaged(ValueError):
    """The file is not what was written; says in what."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Header(msgspec.Struct, frozen=True):
    identity: str
    facts: ModelFacts
    size: int  # bytes of all tensors
    checksums: list[int]  # CRC-32 of each piece of them
    tensors: list[_Tensor]
    model: msgspec.Raw  # a `PackedModel`, with a tensor's number for each tensor


def write(fd: int, identity: str, facts: ModelFacts, model: PackedModel) -> None:
    """Writes `model` to `fd`, a file that is empty. Raises `OSError`."""
    writer = _Writer()
    described = msgspec.Raw(msgspec.msgpack.encode(model, enc_hook=writer.add))
    header = _Header(identity, facts, writer.size, writer.write(fd), writer.tensors, described)
    content = msgspec.msgpack.encode(header)
    _write_all(fd, content + _TRAILER.pack(_MAGIC, len(content), zlib.crc32(content)))


class PackedFile:
    """A file whose header has been read."""

    def __init__(self, fd: int) -> None:
        """Takes `fd` over. Raises `Damaged`, `OSError`."""
        self._fd = fd
        try:
            self._header = _read_header(fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def identity(self) -> str:
        return self._header.identity

    @property
    def facts(self) -> ModelFacts:
        return self._header.facts

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self._header.size

    def read(self, threads: int, progress: Progress) -> PackedModel:
        """All of it, with `threads` threads. Raises `Damaged`, `OSError`."""
        header = self._header
        memory = fresh(header.size) if header.size else torch.empty(0, dtype=torch.uint8)
        into = memoryview(memory.numpy())  # type: ignore[arg-type]
        progress(0, header.size)
        self._check_pieces(threads, lambda start: self._piece(into[start : start + _PIECE], start), progress)
        return self._model_over(memory)

    def mapped(self, threads: int) -> PackedModel:
        """All of it over the file's own pages, which processes share, checked with `threads` threads. Do not write to
        it. Raises `Damaged`, `OSError`."""
        if not self._header.size:
            return self._model_over(torch.empty(0, dtype=torch.uint8))
        pages = self._pages()
        view = memoryview(pages.numpy())  # type: ignore[arg-type]
        self._check_pieces(threads, lambda start: zlib.crc32(view[start : start + _PIECE]))
        return self._model_over(pages)

    def streamed(self, threads: int, budget: int, progress: Progress) -> tuple[PackedModel, WeightStreamer | None]:
        """All of it within `budget` bytes of memory: what does not fit stays in the file, mapped, and is read by the
        streamer; None: all fits. Raises `Damaged`, `OSError`; `ConfigurationError` where `budget` is too small."""
        header = self._header
        if header.size <= budget:
            return self.read(threads, progress), None
        pages = self._pages()
        layers = _layers_of(self._model_over(pages), pages.data_ptr())
        residency = plan_residency(layers, header.size - sum(layer.size for layer in layers), budget)
        extents = [extent for at in residency.streamed for extent in (*layers[at].dense, *layers[at].routed)]
        there = {extent.offset for extent in extents}
        kept = [one for one in header.tensors if one.offset not in there]
        memory = self._read_kept(kept, threads, progress)
        places = dict(zip((one.offset for one in kept), _places(kept), strict=True))

        def find(described: _Tensor) -> Tensor:
            at = places.get(described.offset)
            whole, first = (pages, described.offset) if at is None else (memory, at)
            return whole[first : first + described.nbytes]

        weights = StreamedWeights(residency.memory, residency.per_step, measure_rate(self._fd, joined(extents)))
        streamer = WeightStreamer(pages, self._fd, {at: layers[at] for at in residency.streamed}, len(layers), weights)
        return self._model_of(find), streamer

    def _read_kept(self, kept: list[_Tensor], threads: int, progress: Progress) -> Tensor:
        """`kept` end to end, in the order of the file, all of which is checked."""
        header = self._header
        memory = fresh(sum(_padded(one.nbytes) for one in kept))
        into = memoryview(memory.numpy())  # type: ignore[arg-type]
        places, starts = _places(kept), [one.offset for one in kept]

        def work(start: int) -> int:
            piece = memoryview(bytearray(min(_PIECE, header.size - start)))
            checksum = self._piece(piece, start)
            at = max(0, bisect_right(starts, start) - 1)
            while at < len(kept) and starts[at] < start + len(piece):
                first, end = max(starts[at], start), min(starts[at] + kept[at].nbytes, start + len(piece))
                if first < end:
                    to = places[at] + first - starts[at]
                    into[to : to + end - first] = piece[first - start : end - start]
                at += 1
            os.posix_fadvise(self._fd, start, len(piece), os.POSIX_FADV_DONTNEED)
            return checksum

        progress(0, header.size)
        self._check_pieces(threads, work, progress)
        return memory

    def _pages(self) -> Tensor:
        """The weights' own pages: uint8."""
        size = self._header.size
        if os.fstat(self._fd).st_size < size:
            raise Damaged("it has become shorter")
        # Private and writable, because torch warns of tensors over memory that cannot be written.
        pages = mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _check_pieces(
        self, threads: int, checksum_of: Callable[[int], int], progress: Progress = lambda done, total: None
    ) -> None:
        """`checksum_of` each piece from its start on, by `threads` threads. Raises `Damaged`."""
        header = self._header
        starts = range(0, header.size, _PIECE)
        with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
            for start, found in zip(starts, pool.map(checksum_of, starts), strict=True):
                if found != header.checksums[start // _PIECE]:
                    raise Damaged(f"its bytes from {start} on are not those that were written")
                progress(min(start + _PIECE, header.size), header.size)

    def _model_over(self, memory: Tensor) -> PackedModel:
        return self._model_of(lambda one: memory[one.offset : one.offset + one.nbytes])

    def _model_of(self, find: Callable[[_Tensor], Tensor]) -> PackedModel:
        """`find`: the bytes of a tensor."""

        def tensor(_: type, number: int) -> Tensor:
            described = self._header.tensors[number]
            return find(described).view(_DTYPES[described.dtype]).view(described.shape)

        return msgspec.msgpack.decode(self._header.model, type=PackedModel, dec_hook=tensor)

    def close(self) -> None:
        os.close(self._fd)

    def _piece(self, piece: memoryview, start: int) -> int:
        """Fills `piece` from `start` on; its checksum."""
        done = 0
        while done < len(piece):
            count = os.preadv(self._fd, [piece[done:]], start + done)
            if not count:
                raise Damaged("it has become shorter")
            done += count
        return zlib.crc32(piece)


def _places(tensors: Sequence[_Tensor]) -> list[int]:
    """Where each begins, padded and end to end."""
    return [0, *accumulate(_padded(one.nbytes) for one in tensors)][: len(tensors)]


def _layers_of(model: PackedModel, base: int) -> list[LayerExtents]:
    """Where the weights are that each layer alone is multiplied with, of a model that lies from address `base` on."""
    found = []
    for layer in model.layers:
        every = [layer.experts.gate_up, layer.experts.down] if layer.experts else []
        dense = [linear for linear in layer.linears if all(linear is not expert for expert in every)]
        chosen = layer.experts.choice.chosen / layer.experts.count if layer.experts else 0.0
        found.append(LayerExtents(_extents(dense, base), _extents(every, base), chosen))
    count = Counter(extent for layer in found for extent in (*layer.dense, *layer.routed))
    shared = {extent for extent, layers in count.items() if layers > 1}
    shared |= {*_extents([model.head, model.embedding], base)}
    return [
        LayerExtents(
            [extent for extent in layer.dense if extent not in shared],
            [extent for extent in layer.routed if extent not in shared],
            layer.chosen,
        )
        for layer in found
    ]


def _extents(linears: Iterable[PackedLinear], base: int) -> list[Extent]:
    parts = (part.packed for linear in linears for part in linear.parts)
    return [Extent(packed.data_ptr() - base, packed.nbytes) for packed in parts]


def _read_header(fd: int) -> _Header:
    size = os.fstat(fd).st_size
    trailer = os.pread(fd, _TRAILER.size, max(0, size - _TRAILER.size))
    if len(trailer) < _TRAILER.size:
        raise Damaged("it is too short")
    magic, length, checksum = _TRAILER.unpack(trailer)
    begin = size - _TRAILER.size - length
    if magic != _MAGIC or begin < 0:
        raise Damaged("it does not end as it was written")
    content = os.pread(fd, length, begin)
    if len(content) != length or zlib.crc32(content) != checksum:
        raise Damaged("its header is not the one that was written")
    try:
        header = msgspec.msgpack.decode(content, type=_Header)
    except msgspec.MsgspecError as error:
        raise Damaged(f"its header is not understood ({error})") from None
    if header.size != begin or len(header.checksums) != -(-begin // _PIECE):
        raise Damaged("its length is not the one that was written")
    return header


class _Writer:
    """Collects tensors, then writes them end to end."""

    def __init__(self) -> None:
        self.tensors: list[_Tensor] = []
        self.size = 0
        self._held: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """Its number; the same for one that was added before."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            name = next(name for name, dtype in _DTYPES.items() if dtype is tensor.dtype)
            self.tensors.append(_Tensor(self.size, name, tuple(tensor.shape)))
            self._held.append(tensor)
            self.size += _padded(tensor.nbytes)
        return number

    def write(self, fd: int) -> list[int]:
        """Returns the checksum of each piece."""
        checksums: list[int] = []
        room, running = _PIECE, 0
        for part in self._bytes():
            while len(part):
                piece, part = part[:room], part[room:]
                _write_all(fd, piece)
                running = zlib.crc32(piece, running)
                room -= len(piece)
                if not room:
                    checksums.append(running)
                    room, running = _PIECE, 0
        return checksums if room == _PIECE else [*checksums, running]

    def _bytes(self) -> Iterator[memoryview]:
        for tensor in self._held:
            yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            yield memoryview(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write_all(fd: int, content: Any) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(fd, view) :]

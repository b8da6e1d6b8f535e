"""GGUF files: numbers and texts about a model, and named tensors over mapped bytes.

    "GGUF", version, counts │ metadata: key, type, value │ tensors: name, shape, type, offset │ padding │ their bytes

A file is not trusted: every length, count and offset is held against the file's size before it is used, and what
reading a header may hold is bounded. Tensors over the map are made once all of them are known to lie in it.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.errors import ModelLoadError
from shared.models import gguf_parts

if TYPE_CHECKING:  # takes seconds, and a damaged file is refused without it
    from torch import Tensor

Value = int | float | bool | str | tuple[int | float | bool, ...]

_LONGEST_HEADER = 100_000_000  # bytes. A vocabulary of 256,000 tokens with its merges takes 12 million
_LONGEST_KEY = 65_535  # bytes, the format's own limit; of the name of a tensor too, which has 64 at most
# Numbers of an array that are kept: enough for one per layer. Vocabularies are longer, and passed over.
_LONGEST_ARRAY = 1024
_MOST_DIMENSIONS = 4
_LARGEST = 1 << 50  # values of a tensor
_VERSIONS = (2, 3)
_FLOAT, STRING, ARRAY = 6, 8, 9
# Type of a value -> how `struct` names it.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as it is stored."""

    name: str
    # Rows first, as everywhere but in the file; the last dimension is stored in blocks.
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # of the file

    @property
    def row_bytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // int(values) * int(size)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself."""

    metadata: Mapping[str, Value]  # without arrays of texts, and long ones
    tensors: tuple[GgufTensor, ...]
    # Where each key lies in the file, with its value; of those too that `metadata` lacks
    spans: Mapping[str, slice]


class GgufFile:
    """A file, mapped. Raises `ModelLoadError` where it cannot be read or is no whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if file.read(4) != b"GGUF":
                    raise ModelLoadError(f"The file {path} is not a GGUF file; fetch it again.")
                # Private and writable, because torch warns of tensors over memory that cannot be written.
                self._memory = mmap.mmap(
                    file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except OSError as error:
            raise ModelLoadError(f"The file {path} cannot be read ({error.strerror}); check the path.") from error
        try:
            self.header = _Reader(self._memory).header()
        except ValueError as error:
            raise ModelLoadError(
                f"The GGUF file {path} cannot be read ({error}); it is damaged or was not fetched to its end, fetch it "
                "again."
            ) from error

    def rows(self, tensor: GgufTensor) -> "Tensor":
        """uint8 [rows, bytes of a row] over the mapped file. Do not write to it."""
        import torch

        held = torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        return held.view(tensor.rows, tensor.row_bytes)

    def raw_entry(self, key: str) -> bytes:
        """`key` of the metadata and its value, as they are stored."""
        return self._memory[self.header.spans[key]]

    def array(self, key: str) -> list[Any]:
        """The values of an array of the metadata, however long: texts, or numbers. Raises `ModelLoadError` where it is
        not there, or no array."""
        if (span := self.header.spans.get(key)) is None:
            raise ModelLoadError(f"The file {self.path} does not say {key}; fetch it again, or choose another.")
        at = span.start + 8 + len(key.encode())
        kind, inner, count = struct.unpack_from("<IIQ", self._memory, at)
        if kind != ARRAY:
            raise ModelLoadError(f"The file {self.path} has {key} as one value, where a list belongs; fetch it again.")
        at += 16
        return (
            self._texts(at, count)
            if inner == STRING
            else [*struct.unpack_from(f"<{count}{NUMBERS[inner]}", self._memory, at)]
        )

    def number(self, key: str, index: int) -> GgufTensor:
        """Of a list of float32 in the metadata, as a tensor of one value. Raises `ModelLoadError`."""
        numbers = self.array(key)
        begin = self.header.spans[key].start + 8 + len(key.encode())
        if index >= len(numbers) or struct.unpack_from("<I", self._memory, begin + 4)[0] != _FLOAT:
            raise ModelLoadError(f"The file {self.path} has no number {index} of float32 in {key}; fetch it again.")
        return GgufTensor(f"{key}[{index}]", (1,), GGMLQuantizationType.F32, begin + 16 + 4 * index)

    def _texts(self, at: int, count: int) -> list[str]:
        length, memory = struct.Struct("<Q").unpack_from, self._memory
        texts = []
        for _ in range(count):
            begin = at + 8
            at = begin + length(memory, at)[0]
            texts.append(memory[begin:at])
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"The file {self.path} has texts that are not UTF-8; fetch it again.") from error

    def numbers(self, tensor: GgufTensor) -> "Tensor":
        """Of a vector, or a small tensor: [values]. Raises `ValueError` where its scales are no numbers."""
        from services.executor.model.loading.gguf_blocks import values

        return values(self.rows(tensor), tensor.kind).flatten()

    def release(self) -> None:
        """Takes the file's pages out of this process; they come back when they are touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)


def open_parts(path: Path) -> list[GgufFile]:
    """The model's files, of which `path` is one. Raises `ModelLoadError` where one is missing or of another model."""
    paths = gguf_parts(path)
    if len(paths) > 1 and (missing := [part for part in paths if not part.exists()]):
        raise ModelLoadError(
            f"The file {missing[0]} does not exist; check the path, and that all {len(paths)} files of the model are "
            "in one directory."
        )
    files = [GgufFile(part) for part in paths]
    for number, file in enumerate(files):
        said = (file.header.metadata.get("split.no", 0), file.header.metadata.get("split.count", 1) or 1)
        if said != (number, len(files)):
            raise ModelLoadError(
                f"The file {file.path} is not number {number + 1} of {len(files)} files of a model, as its name says; "
                "fetch the model's files again, under their own names."
            )
    if doubled := _doubled(tensor.name for file in files for tensor in file.header.tensors):
        raise ModelLoadError(f"Two of the files beside {path} hold a tensor {doubled}; fetch the model's files again.")
    held = sum(len(file.header.tensors) for file in files)
    for file in files:
        if (count := file.header.metadata.get("split.tensors.count", held)) != held:
            raise ModelLoadError(
                f"The file {file.path} is of a model of {count} tensors, and with those beside it there are {held}: "
                "one is of another model; fetch the model's files again."
            )
    return files


def _doubled(names: Iterable[str]) -> str:
    """One that stands twice; "" where none does."""
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    return name if count > 1 else ""


class _Reader:
    """Reads a header from its beginning to its end. Raises `ValueError` with the reason."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._size = len(memory)
        self._end = min(self._size, _LONGEST_HEADER)
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise ValueError("it is of a big-endian machine" if swapped else f"its version {version} is not read")
        tensors, values = self._number("Q"), self._number("Q")
        metadata: dict[str, Value] = {}
        spans: dict[str, slice] = {}
        for _ in range(values):
            begin = self._at
            key = self._text(_LONGEST_KEY)
            if key in spans:
                raise ValueError(f"it says {key!r} twice")
            value = self._value(self._number("I"), key)
            spans[key] = slice(begin, self._at)
            if value is not None:
                metadata[key] = value
        described = [self._tensor() for _ in range(tensors)]
        return GgufHeader(metadata, self._placed(described, metadata), spans)

    def _placed(self, described: list[GgufTensor], metadata: Mapping[str, Value]) -> tuple[GgufTensor, ...]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        placed = []
        behind, before = 0, ""
        for tensor in sorted(described, key=lambda tensor: tensor.offset):
            if tensor.offset % alignment:
                raise ValueError(f"the tensor {tensor.name} is not at a multiple of {alignment} bytes")
            if tensor.offset < behind:
                raise ValueError(f"the tensors {before} and {tensor.name} overlap")
            behind, before = tensor.offset + tensor.nbytes, tensor.name
            if begin + behind > self._size:
                raise ValueError(f"it ends {begin + behind - self._size} bytes before the end of the tensor {before}")
            placed.append(GgufTensor(tensor.name, tensor.shape, tensor.kind, begin + tensor.offset))
        if doubled := _doubled(tensor.name for tensor in placed):
            raise ValueError(f"two of its tensors have one name, {doubled}")
        return tuple(placed)

    def _tensor(self) -> GgufTensor:
        name = self._text(_LONGEST_KEY)
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"the tensor {name} has the type {number}, which is not known") from None
        if not all(shape) or math.prod(shape) > _LARGEST:
            raise ValueError(f"the tensor {name} has the shape {list(shape)}")
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(
                f"the rows of the tensor {name} have {shape[-1]} values, which is not a whole number of "
                f"blocks of type {kind.name}"
            )
        return GgufTensor(name, shape, kind, offset)

    def _value(self, kind: int, key: str) -> Value | None:
        """None for what is passed over."""
        if kind == STRING:
            return self._text(_LONGEST_HEADER)
        if kind != ARRAY:
            return self._number(self._format_of(kind, key))
        inner, count = self._number("I"), self._number("Q")
        if inner == STRING:
            self._pass_over_texts(count)
            return None
        form = self._format_of(inner, key)
        begin = self._take(count * struct.calcsize(f"<{form}"))
        if count > _LONGEST_ARRAY:
            return None
        return struct.unpack_from(f"<{count}{form}", self._memory, begin)

    def _pass_over_texts(self, count: int) -> None:
        """As `_take` does for each, of the hundred thousands of a vocabulary."""
        at, last, length = self._at, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + length(self._memory, at)[0]
        else:
            self._take(at - self._at)
            return
        self._take(self._end - self._at + 1)  # which is refused

    def _format_of(self, kind: int, key: str) -> str:
        if kind not in NUMBERS:
            raise ValueError(f"{key!r} has a value of type {kind}, which is not read")
        return NUMBERS[kind]

    def _number(self, form: str) -> int:
        begin = self._take(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._memory, begin)[0]  # type: ignore[no-any-return]

    def _text(self, longest: int) -> str:
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"a text of {length} bytes is longer than {longest}")
        begin = self._take(length)
        try:
            return self._memory[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise ValueError("a text is not UTF-8") from None

    def _take(self, count: int) -> int:
        """Where the next `count` bytes begin."""
        begin = self._at
        if count > self._end - begin:
            if self._end < self._size:
                raise ValueError(f"its header is longer than {_LONGEST_HEADER} bytes")
            raise ValueError("it ends within its header")
        self._at = begin + count
        return begin

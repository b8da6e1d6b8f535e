"""A GGUF file's fields as the package `gguf` gives them to transformers, from a header that has been read.

Its own reader makes an array of NumPy of each length and each text of a vocabulary, which takes seconds, each time that
transformers asks for something of the file.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gguf

from services.executor.model.loading.gguf_file import ARRAY, NUMBERS, STRING, GgufFile, GgufTensor


@dataclass(frozen=True)
class _Field:
    """As `gguf.ReaderField`: a value is `parts[index]` for each `index` of `data`, a number's in a tuple."""

    parts: list[Any]
    types: list[int]

    @property
    def data(self) -> range:
        return range(len(self.parts))

    def contents(self) -> Any:
        """Its value; of an array a list of them."""
        texts = self.types[-1] == STRING
        values = [str(part, "utf-8") if texts else part[0] for part in self.parts]
        return values if self.types[0] == ARRAY else values[0]


class _Reader:
    """As `gguf.GGUFReader`, without what no model's configuration or tokenizer is made of."""

    def __init__(self, file: GgufFile) -> None:
        self.fields = {key: _field(key, file.raw_entry(key)) for key in file.header.spans}
        self.tensors: tuple[GgufTensor, ...] = file.header.tensors


@contextmanager
def read_once(file: GgufFile) -> Iterator[None]:
    """Whatever reads a file with `gguf` meanwhile reads `file`. Not for what reads its tensors."""
    reader, own = _Reader(file), gguf.GGUFReader
    gguf.GGUFReader = lambda path: reader
    try:
        yield
    finally:
        gguf.GGUFReader = own


def _field(key: str, said: bytes) -> _Field:
    at = 8 + len(key.encode())
    kind = _number(said, "I", at)
    if kind != ARRAY:
        return _Field(_values(said, kind, at + 4, 1), [kind])
    inner, count = _number(said, "I", at + 4), _number(said, "Q", at + 8)
    return _Field(_values(said, inner, at + 16, count), [kind, inner])


def _values(said: bytes, kind: int, at: int, count: int) -> list[Any]:
    if kind != STRING:
        return [(value,) for value in struct.unpack_from(f"<{count}{NUMBERS[kind]}", said, at)]
    texts = []
    for _ in range(count):
        end = at + 8 + _number(said, "Q", at)
        texts.append(said[at + 8 : end])
        at = end
    return texts


def _number(said: bytes, form: str, at: int) -> int:
    return struct.unpack_from(f"<{form}", said, at)[0]  # type: ignore[no-any-return]

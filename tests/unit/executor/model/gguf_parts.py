"""GGUF files apart: keys and tensors that can be left out, doubled and misnamed, which the package `gguf` refuses."""

import struct
from pathlib import Path
from typing import NamedTuple

from services.executor.model.loading.gguf_file import GgufFile

_ALIGNMENT = 32


class Key(NamedTuple):
    name: str
    value: bytes  # with its type


class Stored(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes


def parts_of(path: Path) -> tuple[list[Key], list[Stored]]:
    """Keys and tensors, in the order of the file."""
    file = GgufFile(path)
    keys = [Key(name, file.raw_entry(name)[8 + len(name.encode()) :]) for name in file.header.spans]
    tensors = [
        Stored(one.name, one.shape, int(one.kind), file.rows(one).numpy().tobytes()) for one in file.header.tensors
    ]
    return keys, tensors


def write_parts(path: Path, keys: list[Key], tensors: list[Stored]) -> Path:
    """The file of these, whatever they are called."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    header += b"".join(_text(key.name) + key.value for key in keys)
    data = b""
    for tensor in tensors:
        place = (len(tensor.shape), *reversed(tensor.shape), tensor.kind, len(data))
        header += _text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}QIQ", *place)
        data += tensor.data + bytes(-len(tensor.data) % _ALIGNMENT)
    path.write_bytes(header + bytes(-len(header) % _ALIGNMENT) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()

"""Tables in shared memory, declared as classes. Whoever maps the same file reads what another process has written
there, be that one busy, stopped or dead.

    @table
    class Rank(ctypes.Structure):
        pid: int                                       an aligned 64-bit integer; float: a double
        steps: Annotated[int, "Steps computed."]       the same, with what others read of it here
        uuid: Annotated[Any, ctypes.c_uint8 * 16]      any other type of ctypes

Each field has one writer, so that no lock is needed.
"""

import ctypes
import mmap
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Row = TypeVar("Row", bound=ctypes.Structure)
_PLAIN: dict[Any, Any] = {int: ctypes.c_int64, float: ctypes.c_double}


def table(row: type[Row]) -> type[Row]:
    """Lays the annotated attributes of `row` out one after another."""
    row._fields_ = [(name, _type_of(hint)) for name, hint in row.__annotations__.items()]
    return row


def _type_of(hint: Any) -> Any:
    plain = getattr(hint, "__origin__", hint)
    return _PLAIN[plain] if plain in _PLAIN else hint.__metadata__[0]


def numbers_of(message: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """`_fields_` of a row with the fields of `message`, all of them numbers."""
    return [(field.name, _PLAIN[field.type]) for field in msgspec.structs.fields(message)]


def map_tables(path: Path | None, *parts: Any, create: bool = False) -> list[Any]:
    """One of each type of `parts`, which lie one after another in the file, mapped for as long as somebody has any of
    them; `create`: it is made, all zeros. None: in memory that nobody else sees."""
    size = sum(map(ctypes.sizeof, parts))
    if create and path is not None:
        path.unlink(missing_ok=True)  # who still has an older one mapped would die of a bus error
        path.write_bytes(bytes(size))
    memory: Any = bytearray(size)
    if path is not None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
    found, at = [], 0
    for part in parts:
        found.append(part.from_buffer(memory, at))
        at += ctypes.sizeof(part)
    return found

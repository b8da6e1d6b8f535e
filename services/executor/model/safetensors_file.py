"""A safetensors file as tensors over its mapped bytes: nothing is read until a tensor is.

    8 bytes: length n of the header │ n bytes: JSON, name -> dtype, shape, offsets │ the tensors' bytes

Source: https://github.com/huggingface/safetensors, section "Format".
"""

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.executor.model.mapped_file import MappedFile

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""The format's own limit; more is a file of another kind."""
_NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python 3.11 does not name: the map is never written, so no memory is set aside."""


def map_safetensors(path: Path) -> MappedFile:
    """The tensors of `path`. Raises `OSError` where the file cannot be opened and `ValueError`, with the
    reason, where it is not whole.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_LONGEST_HEADER, size - _LENGTH_BYTES):
            raise ValueError(f"its {size} bytes do not hold the header")
        entries = _entries(file.read(length))
        begin = _LENGTH_BYTES + length
        _check_extent(entries, size - begin)
        # Private and writable, because torch warns of tensors over memory that cannot be written.
        mapped = mmap.mmap(
            file.fileno(),
            size,
            flags=mmap.MAP_PRIVATE | _NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    tensors = {name: _tensor(mapped, begin, *entry) for name, entry in entries.items()}
    return MappedFile(tensors, mapped, path)


_Entry = tuple[torch.dtype, list[int], int]
"""dtype, shape, offset behind the header."""


def _entries(header: bytes) -> dict[str, _Entry]:
    try:
        described: dict[str, Any] = json.loads(header)
        described.pop("__metadata__", None)
        return {name: _entry(name, value) for name, value in described.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("its header is no description of tensors") from error


def _entry(name: str, value: dict[str, Any]) -> _Entry:
    dtype = _DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(f"the tensor {name} has the type {value['dtype']!r}, which is not read")
    shape = [int(extent) for extent in value["shape"]]
    start, stop = (int(offset) for offset in value["data_offsets"])
    if min([start, *shape]) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"the shape of the tensor {name} does not agree with its bytes")
    return dtype, shape, start


def _check_extent(entries: dict[str, _Entry], available: int) -> None:
    ends = {
        name: start + math.prod(shape) * dtype.itemsize for name, (dtype, shape, start) in entries.items()
    }
    last = max(ends, key=lambda name: ends[name], default=None)
    if last is not None and ends[last] > available:
        raise ValueError(f"it ends {ends[last] - available} bytes before the end of the tensor {last}")


def _tensor(mapped: mmap.mmap, begin: int, dtype: torch.dtype, shape: list[int], start: int) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin + start).view(shape)

"""The weight files of a model directory, whatever their format: named tensors over mapped bytes.

Opening them reads headers alone. A rank then touches the bytes of its own slices only, mapped, or read where that is
faster. Files of torch.save may hold named tensors alone; code is refused. Of safetensors:

    8 bytes: length n of the header │ n bytes: JSON, name -> dtype, shape, offsets │ the tensors' bytes

Source: https://github.com/huggingface/safetensors, section "Format".
"""

import json
import math
import mmap
import os
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.loading.arena import NO_RESERVE
from services.executor.model.loading.quantization_schemes import Find, coded_tensors
from services.executor.model.loading.quantized_tensors import CodedTensor
from shared.errors import ModelLoadError, reason_of


class MappedFile:
    """Tensors over the bytes of a file, on the CPU, in the file's dtypes. Do not write to them."""

    def __init__(
        self, tensors: Mapping[str, Tensor], memory: mmap.mmap | None = None, path: Path | None = None
    ) -> None:
        """`memory` is the map of `path` that all of `tensors` lie in, where it is ours to advise the system about."""
        self.tensors = tensors
        self._memory = memory
        self._path = path
        self._file: IO[bytes] | None = None
        self._opening = threading.Lock()
        self._begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if memory is not None else 0

    def release(self, view: Tensor) -> None:
        """Takes the pages of `view`, part of one of the tensors, out of this process. The file keeps them in
        the page cache, and they come back when they are touched."""
        if self._memory is None or not view.numel() or not hasattr(mmap, "MADV_DONTNEED"):
            return
        steps = zip(view.shape, view.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
        start = view.data_ptr() - self._begin
        if not 0 <= start < len(self._memory):
            return  # a copy, not a part of the file
        aligned = start - start % mmap.PAGESIZE
        length = start - aligned + elements * view.element_size()
        self._memory.madvise(mmap.MADV_DONTNEED, aligned, min(length, len(self._memory) - aligned))

    def copy(self, view: Tensor, into: Tensor) -> None:
        """Copies `view`, part of one of the tensors, to `into`, contiguous and of its shape and dtype, in one thread
        and without the interpreter's lock. Bytes that lie together are read: their pages need not be mapped then.

        Raises `OSError` where the file cannot be read, EOFError where it has become shorter.
        """
        start = view.data_ptr() - self._begin
        if self._path is None or self._memory is None or not view.is_contiguous():
            np.copyto(_bytes(into), _bytes(view))
        elif view.numel():
            assert 0 <= start < len(self._memory), "the view is not part of the file"
            self._read(start, memoryview(_bytes(into.view(-1).view(torch.uint8))))  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing more is read; tensors over the map keep it."""
        with self._opening:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read(self, start: int, into: memoryview) -> None:
        file = self._opened()
        while into:
            count = os.preadv(file.fileno(), [into], start)
            if not count:
                raise EOFError(f"{self._path} ends at byte {start}, before the end of its tensors")
            into, start = into[count:], start + count

    def _opened(self) -> IO[bytes]:
        with self._opening:
            if self._file is None:
                assert self._path is not None, "only a file with a path is read"
                self._file = self._path.open("rb", buffering=0)
            assert self._file is not None
            return self._file


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bytes(tensor: Tensor) -> NDArray[np.generic]:
    """The same memory as integers of the same size: numpy knows neither bf16 nor fp8."""
    words: NDArray[np.generic] = tensor.view(_WORDS[tensor.element_size()]).numpy()
    return words


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
    "F8_E8M0": torch.float8_e8m0fnu,
}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit; more is a file of another kind


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
            file.fileno(), size, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    tensors = {name: _tensor(mapped, begin, *entry) for name, entry in entries.items()}
    return MappedFile(tensors, mapped, path)


_Entry = tuple[torch.dtype, list[int], int]  # dtype, shape, offset behind the header


def _entries(header: bytes) -> dict[str, _Entry]:
    try:
        described: dict[str, Any] = json.loads(header, object_pairs_hook=_once)
        described.pop("__metadata__", None)
        return {name: _entry(name, value) for name, value in described.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("its header does not describe tensors") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises `ValueError` where a name stands twice: JSON's reader would take the last."""
    held = dict(pairs)
    if len(held) != len(pairs):
        doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has {doubled} twice")
    return held


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
    behind, before = 0, ""
    for name, (dtype, shape, start) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        size = math.prod(shape) * dtype.itemsize
        if size and start < behind:
            raise ValueError(f"the tensors {before} and {name} overlap")
        if size:
            behind, before = start + size, name
    if behind > available:
        raise ValueError(f"it ends {behind - available} bytes before the end of the tensor {before}")


def _tensor(mapped: mmap.mmap, begin: int, dtype: torch.dtype, shape: list[int], start: int) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin + start).view(shape)


_GLOBAL = re.compile(r"GLOBAL (\w+(?:\.\w+)+)")  # how torch's reader names what a pickle would import


def map_pytorch(path: Path) -> MappedFile:
    """The tensors of `path`.

    Raises `OSError` where the file cannot be opened, `ValueError`, with the reason, where it is not whole,
    and `ModelLoadError` where it holds code or something else than named tensors.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        code = _GLOBAL.search(str(error))
        if code is None:
            raise ValueError("its description of the tensors makes no sense") from error
        raise ModelLoadError(
            f"The weight file {path} holds {code.group(1)}, which is code, and code in weights is never run; "
            "use weights saved as safetensors."
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        if "_use_new_zipfile_serialization" in str(error) and path.stat().st_size:
            raise ModelLoadError(
                f"The weight file {path} is not in the zip format of torch 1.6 and later, so it is damaged or "
                "older; fetch it again, or load and save it once with a newer torch."
            ) from error
        raise ValueError(reason_of(error)) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in content.items()
    ):
        raise ModelLoadError(
            f"The weight file {path} holds something else than named tensors; "
            "save the model's state_dict, or use safetensors weights."
        )
    return MappedFile({name: value.detach() for name, value in content.items()})


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


@dataclass(frozen=True)
class _Format:
    single: str  # the name of weights that are one file
    open: Callable[[Path], MappedFile]

    @property
    def index(self) -> str:
        """The name of the file that says which tensor is in which of several files."""
        return f"{self.single}.index.json"


# Best first.
_FORMATS = (_Format("model.safetensors", map_safetensors), _Format("pytorch_model.bin", map_pytorch))
_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")


class WeightFiles:
    """The weights of a directory, open for reading. A context manager."""

    # Weights that are held as codes, by the name that they would have as plain tensors.
    coded: Mapping[str, CodedTensor]

    def __init__(self, directory: Path, find: Find | None = None):
        """Opens them; `find` knows what is coded. Raises `ModelLoadError` when a file is missing, damaged or of another
        format."""
        format_, index = _choose(directory)
        self._files: dict[str, MappedFile] = {}  # tensor name -> its file
        for file in sorted(set(index.values())) if index is not None else [format_.single]:
            mapped = _opened(directory / file, format_)
            # Where two files hold a name, the index says which is meant.
            meant = [name for name in mapped.tensors if index is None or index.get(name, file) == file]
            if doubled := sorted(self._files.keys() & set(meant)):
                raise ModelLoadError(
                    f"Two weight files in {directory} hold {some_of(doubled)}, and {format_.index} does not say which "
                    "is meant; fetch the model again."
                )
            self._files.update(dict.fromkeys(meant, mapped))
        missing = sorted(name for name in index or () if name not in self._files)
        if missing:
            raise ModelLoadError(
                f"{format_.index} in {directory} names {some_of(missing)}, which the weight files do not hold; "
                "fetch the model again."
            )
        self.coded = {}
        self._made_of: dict[str, tuple[str, ...]] = {}
        if find is not None:
            held = {name: file.tensors[name] for name, file in self._files.items()}
            self.coded, self._made_of = coded_tensors(find, held)

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name; of one that is coded as it would be if it were plain."""
        parts = {part for names in self._made_of.values() for part in names}
        plain = {name: tuple(file.tensors[name].shape) for name, file in self._files.items() if name not in parts}
        return plain | {name: tensor.shape for name, tensor in self.coded.items()}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` over its mapped bytes, on the CPU, in the file's dtype. Do not write to it."""
        return self._files[name].tensors[name]

    def stored_bytes(self, name: str) -> int:
        """Of the tensor `name` in the files, of all that it is made of where it is coded."""
        return sum(self.tensor(part).nbytes for part in self._made_of.get(name, (name,)))

    def copy(self, name: str, view: Tensor, into: Tensor) -> None:
        """Copies `view`, part of the tensor `name`, to `into`, contiguous and of its shape and dtype: in the calling
        thread alone, so that several threads can. Raises `ModelLoadError` where the file cannot be read any more."""
        try:
            self._files[name].copy(view, into)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelLoadError(
                f"The weights of {name} cannot be read ({reason}); check the disk, and that nobody writes to the model."
            ) from error

    def release(self, name: str, view: Tensor) -> None:
        """Says that `view`, part of the tensor `name`, has been read and need not stay in this process."""
        self._files[name].release(view)

    def release_coded(self, name: str) -> None:
        """`release`, of all that the coded tensor `name` is made of."""
        self.releaser(name)()

    def releaser(self, name: str) -> Callable[[], None]:
        """`release_coded`, of `name`, which may be called when the files are closed."""
        parts = [(self._files[part], self.tensor(part)) for part in self._made_of.get(name, ())]

        def release() -> None:
            for file, tensor in parts:
                file.release(tensor)

        return release

    def close(self) -> None:
        """Lets the files go; tensors handed out keep theirs."""
        for file in set(self._files.values()):
            file.close()
        self._files.clear()


def _choose(directory: Path) -> tuple[_Format, Mapping[str, str] | None]:
    """The format to read, and where it is in several files, tensor name -> file name."""
    for format_ in _FORMATS:
        if (directory / format_.index).is_file():
            return format_, _weight_map(directory / format_.index)
        if (directory / format_.single).is_file():
            return format_, None
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"only {some_of(others)}" if others else "no weights"
    names = " or ".join(name for format_ in _FORMATS for name in (format_.single, format_.index))
    raise ModelLoadError(
        f"The model directory {directory} holds {found}, where {names} is needed; "
        "save the model as safetensors (save_pretrained does), or give a .gguf file by its own path."
    )


def _opened(path: Path, format_: _Format) -> MappedFile:
    try:
        return format_.open(path)
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"The weight file {path} is missing, though {format_.index} names it; fetch the model again."
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"The weight file {path} cannot be read ({error.strerror}); check its rights and its disk."
        ) from error
    except ValueError as error:
        raise _damaged(path, error) from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
            raise ValueError("a file name is not plain")
        return dict(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"The weights at {path} cannot be read ({error}); the file is damaged or was not fetched to its end, "
        "fetch the model again."
    )


def some_of(names: Sequence[str]) -> str:
    """For an error: three of them, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

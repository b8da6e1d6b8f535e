"""A weight file whose bytes are mapped, and read only where that is faster."""

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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

    def let_go(self, view: Tensor) -> None:
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
            assert 0 <= start < len(self._memory), "the view is no part of the file"
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

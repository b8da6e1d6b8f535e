"""A weight file whose bytes are mapped, not read."""

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor


class MappedFile:
    """Tensors over the bytes of a file, on the CPU, in the file's dtypes. Do not write to them."""

    def __init__(self, tensors: Mapping[str, Tensor], memory: mmap.mmap | None = None) -> None:
        """`memory` is the map that all of `tensors` lie in, where it is ours to advise the system about."""
        self.tensors = tensors
        self._memory = memory
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

"""Memory for a rank's weights: a few large blocks, in huge pages where the system has them.

Fresh memory costs more than the copy into it: the kernel clears every page, one fault each. In pages of
2 MiB that is five hundred times fewer faults. A block goes back to the system when the last of its tensors
is gone, so weights can be re-packed one after another without being held twice.

    block   │ weight │ weight │ bias-free gap (64-byte alignment) │ weight │        a few, of at most LARGEST
    small   │ norm │ norm │ bias │ ...                                             one, for what is never packed
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21
_LARGEST = 64 << 20
# Bytes below which a tensor is not worth a place among the weights: it would outlive them and keep their
# block.
_SMALL = 64 << 10
_WASTE = 64  # a block may waste one part in so many to end on a huge page

# MAP_NORESERVE, which Python 3.11 does not name: of a map of a file that is never written no memory is set aside.
NO_RESERVE = 0x4000

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


def allocate(specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
    """Uninitialised tensors of `specs` on `device`, in that order."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs]
    tensors: dict[int, Tensor] = {}
    for members in blocks(sizes):
        memory = fresh(sum(_padded(sizes[index]) for index in members))
        offset = 0
        for index in members:
            shape, dtype = specs[index]
            tensors[index] = memory[offset : offset + sizes[index]].view(dtype).view(shape)
            offset += _padded(sizes[index])
    return [tensors[index] for index in range(len(specs))]


def blocks(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Which tensors of `sizes` bytes share a block. Large ones stay in order; a block is at most a 32nd of
    all, or 64 MiB, unless a single tensor is larger."""
    limit = min(max(sum(sizes) // 32, _HUGE_PAGE), _LARGEST)
    small = [index for index, size in enumerate(sizes) if size < _SMALL]
    if small:
        yield small
    members: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size < _SMALL:
            continue
        if members and filled + _padded(size) > limit:
            yield members
            members, filled = [], 0
        members.append(index)
        filled += _padded(size)
    if members:
        yield members


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def in_files(directory: Path) -> Iterator[None]:
    """Meanwhile large memory is that of files without a name in `directory`, where the system puts what does not fit:
    a model that is larger than memory can be packed, as fast as the disk writes. Not for several threads at once."""
    _directories.append(directory)
    try:
        yield
    finally:
        _directories.pop()


_directories: list[Path] = []


def _of_file(size: int, directory: Path) -> Tensor:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told now, and not by a signal later
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def fresh(size: int) -> Tensor:
    """uint8 [size] of memory that nobody has touched, of undefined content. Raises `OSError` within `in_files`."""
    if _directories and size >= _HUGE_PAGE:
        return _of_file(size, _directories[-1])
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # Private: shared anonymous memory is a file to the kernel, and has no huge pages by default.
    memory = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    unaligned = torch.frombuffer(memory, dtype=torch.uint8)
    start = -unaligned.data_ptr() % _HUGE_PAGE
    rest = size % _HUGE_PAGE
    huge = size - rest + (_HUGE_PAGE if rest and _HUGE_PAGE - rest <= size // _WASTE else 0)
    # A kernel without huge pages gives the same memory, filled more slowly.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return unaligned[start : start + size]

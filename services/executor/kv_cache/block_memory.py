"""Where the tensors of a rank's KV store lie: in memory, or in a file that is mapped into it.

    memory   what is written in every step, slots, scales, the summaries of pages
    file     the codes of full blocks, in what the system has of memory; what it has not is read as it is touched

A mapped block is read and written as any other. The system keeps the pages of the file that were used last, writes
changed ones behind, and gives back what other processes need; who wants bytes soon may ask for them ahead
(`native/fetch.h`). The file has no name and goes with the process, however it ends. A disk that cannot give a page ends
the process (SIGBUS): its ring is made anew, and requests go on elsewhere, as after any fault of a host.
"""

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import ConfigurationError

CACHE_LINE = 64  # where tensors begin in host memory, so that kernels load whole lines
# File systems whose files are no use: they take the memory that is to be spared.
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what attention masks must still be finite: 0 * NaN is NaN."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which take no memory and no time until they are touched.
    nbytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(nbytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype).view(size)


class MappedBlockFile:
    """Zeros in a file on disk, from the beginning of a page on."""

    def __init__(self, directory: Path | None, nbytes: int) -> None:
        """`directory`: where it goes; None: where the system keeps temporary files. Raises `ConfigurationError` where
        there is no room for it, or it would lie in memory."""
        place = directory or Path(tempfile.gettempdir())
        self.fd = -1
        try:
            place.mkdir(parents=True, exist_ok=True)
            self.fd, name = tempfile.mkstemp(prefix="ryzanstein-kv-", dir=place)
            Path(name).unlink()
            if (kind := file_system(os.fstat(self.fd).st_dev)) in _IN_MEMORY:
                raise ConfigurationError(
                    f"{place} is in memory ({kind}), and --kv-mapped-memory keeps KV blocks on a disk; name a "
                    "directory on one with --kv-disk-directory."
                )
            os.posix_fallocate(self.fd, 0, nbytes)
            self._map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            raise ConfigurationError(
                f"No file of {nbytes} bytes for KV blocks can be made in {place} ({error.strerror}); free that much "
                "there, name another directory with --kv-disk-directory, or lower --kv-mapped-memory."
            ) from error
        with contextlib.suppress(OSError):  # it is advice: what lies beside a page is seldom read with it
            self._map.madvise(mmap.MADV_RANDOM)
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8 [nbytes]

    def drop(self) -> None:
        """Writes what has changed, and has the system forget all pages: they are read anew."""
        os.fdatasync(self.fd)
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        """The mapping stays as long as tensors need it."""
        if self.fd >= 0:
            os.close(self.fd)


class MappedFiles:
    """The files of one store."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.files: list[MappedBlockFile] = []

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """In a file of its own. Raises `ConfigurationError`."""
        nbytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
        self.files.append(MappedBlockFile(self._directory, nbytes))
        return self.files[-1].content.view(dtype).view(size)

    @property
    def nbytes(self) -> int:
        return sum(file.content.nbytes for file in self.files)

    def drop(self) -> None:
        """`MappedBlockFile.drop`, of all."""
        for file in self.files:
            file.drop()


def file_system(device: int) -> str:
    """The kind of the file system that is mounted from `device`, such as `ext4`; empty: the system does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if fields[2] == wanted and "-" in fields[6:]:
                return fields[fields.index("-", 6) + 1]
    return ""

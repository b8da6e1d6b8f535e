"""The memory that the ranks of a ring on one host share.

It is a memfd: it has no name in any directory, and is gone with the last process that has it mapped or
open, however that one ends. The other ranks reach it through /proc/<pid of rank 0>/fd, which only the
same user may open.
"""

import ctypes
import mmap
import os
import sys

from shared.errors import RingLost


class SharedArea:
    """The mapped memory, zero at first."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(self._map)
        self.size = size
        self.path = path
        """What another process opens; empty there."""

    @classmethod
    def create(cls, size: int) -> "SharedArea":
        fd = os.memfd_create("ryzanstein-ring", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        return cls(fd, size, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> "SharedArea":
        """Raises `RingLost` when the process that made it is gone, or its memory may not be opened."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RingLost(
                f"The ring's shared memory {path} cannot be opened ({error.strerror}); if it stays so, "
                "this host keeps its processes apart: use --collectives gloo."
            ) from error
        return cls(fd, os.fstat(fd).st_size, "")

    @property
    def address(self) -> int:
        assert self._view is not None, "the area has been closed"
        return ctypes.addressof(self._view)

    def seal(self) -> None:
        """Every rank has mapped it: from now on nobody can open it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmaps it. Safe to call twice; nobody may use `address` any more."""
        self.seal()
        if self._view is not None:
            self._view = None
            self._map.close()


def host_has_shared_areas() -> bool:
    """Whether this platform has anonymous files that processes can pass on (Linux)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")

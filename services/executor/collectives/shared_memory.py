"""Collectives between the ranks of one host, through shared memory (`native/shared_memory.h`).

The memory is a memfd: it has no name in any directory, and is gone with the last process that has it mapped or
open, however that one ends. The other ranks reach it through /proc/<pid of rank 0>/fd, which only the
same user may open.
"""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.executor.core.spans import span
from services.executor.native.library import compiled
from shared.errors import ConfigurationError, RingLost


class SharedArea:
    """The mapped memory, zero at first."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(self._map)
        self.size = size
        self.path = path  # what another process opens; empty there

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


# Of one rank's contribution that are in the area at a time: what a core's second-level cache holds well.
PIECE_BYTES = 128 * 1024
IDLE_TIMEOUT = 86400.0  # a hang is seen by the supervisor, and a rank that loads for long is no hang

_REASONS = {
    -1: "another rank has given up",
    -2: "a rank did not arrive within {timeout:g} s",
    -3: "the process of a rank has ended",
    -4: "the ranks do not agree on the ring's shape",
}


def can_share_memory() -> bool:
    """Whether this host can run `SharedMemory`: Linux, with files that have no name, and the compiled library."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and compiled() is not None


def make_area(world_size: int, lanes: int) -> SharedArea:
    """The memory for a ring of `world_size` ranks, to be made by one of them."""
    return SharedArea.create(_library().rz_ring_area_bytes(world_size, lanes, PIECE_BYTES))


class SharedMemory:
    """`Collectives` over a `SharedArea`.

    Sums have the same bits on every rank: contributions are added in float32, in the order of the ranks.
    Only the thread of one operation at a time may call.
    """

    def __init__(
        self, area: SharedArea, rank: int, world_size: int, lanes: int = 1, timeout: float = IDLE_TIMEOUT
    ) -> None:
        """`lanes`: threads of each rank that may call the C functions together; the same on every rank, as
        is the area. `timeout`: seconds that one wait may take. Raises `RingLost` when they do not agree."""
        self.rank = rank
        self.world_size = world_size
        self.lanes = lanes
        self._area = area
        self._shown: ctypes.Structure | None = None
        self._library = _library()
        self._timeout = timeout
        self._pidfds: list[int] = []
        if area.size != self._library.rz_ring_area_bytes(world_size, lanes, PIECE_BYTES):
            raise _lost(-4, timeout)
        self._ring: int | None = self._library.rz_ring_open(area.address, rank, world_size, lanes, PIECE_BYTES)
        if not self._ring:
            raise _lost(-4, timeout)
        self._sums = {torch.float32: self._library.rz_ring_sum_f32, torch.bfloat16: self._library.rz_ring_sum_bf16}

    def meet(self, timeout: float) -> None:
        """Waits for all ranks, for `timeout` seconds; then the area can no longer be opened, and the end
        of a rank's process is noticed in every wait. To be called once, before anything else."""
        later, self._timeout = self._timeout, timeout
        pids = self._gather_to_all(torch.tensor([os.getpid()]))
        self._area.seal()
        self._watch([int(pid) for rank, pid in enumerate(pids) if rank != self.rank])
        self._timeout = later

    def show(self, record: ctypes.Structure) -> None:
        """Has each operation write what it does to `record` (see `rz_ring_show`), until the ring is left."""
        self._shown = record  # the C code has the address alone: this is what keeps the memory behind it
        self._library.rz_ring_show(self.handle, ctypes.addressof(record))

    @property
    def handle(self) -> int:
        """The `rz_ring *`, for C code that calls between two operations of this object."""
        assert self._ring is not None, "the ring has been left"
        return self._ring

    @property
    def busy_seconds(self) -> float:
        """Spent in operations of lane 0 so far."""
        return float(self._library.rz_ring_busy_ns(self.handle, 0)) / 1e9

    @property
    def waited_seconds(self) -> float:
        """How much of `busy_seconds` other ranks were waited for."""
        return float(self._library.rz_ring_waited_ns(self.handle, 0)) / 1e9

    def all_reduce(self, tensor: Tensor) -> Tensor:
        sum_ = self._sums.get(tensor.dtype)
        if sum_ is None:
            return tensor.copy_(torch.stack(self._gather_to_all(tensor)).sum(0))
        assert tensor.is_contiguous()
        with span("communicate: all_reduce"):
            self._check(sum_(self._ring, tensor.data_ptr(), tensor.numel(), self.timeout_ns))
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        tensor = tensor.contiguous()
        parts = [tensor.new_empty((*tensor.shape[:-1], width)) for width in widths] if self.rank == 0 else None
        if parts is not None:
            parts[0] = tensor
        rows = math.prod(tensor.shape[:-1])
        self._gather(tensor, [rows * width * tensor.element_size() for width in widths], parts)
        return parts

    def barrier(self) -> None:
        self._check(self._library.rz_ring_barrier(self._ring, self.timeout_ns))

    def abort(self) -> None:
        """Has every operation of every rank raise `RingLost`, those under way included."""
        self._library.rz_ring_abort(self.handle)

    def close(self) -> None:
        if self._ring is not None:
            ring, self._ring = self._ring, None
            self._library.rz_ring_close(ring)
            self._shown = None
            self._area.close()
            for pidfd in self._pidfds:
                os.close(pidfd)

    @property
    def timeout_ns(self) -> int:
        """Nanoseconds that one wait may take."""
        return int(self._timeout * 1e9)

    def _watch(self, pids: list[int]) -> None:
        try:
            for pid in pids:
                self._pidfds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            raise _lost(-3, 0) from None
        except (AttributeError, OSError):
            return  # an old kernel: the supervisor still sees a rank's end
        self._library.rz_ring_watch(self._ring, (ctypes.c_int * len(pids))(*self._pidfds), len(pids))

    def _gather_to_all(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._gather(tensor, [tensor.nbytes] * self.world_size, parts)
        return parts

    def _gather(self, tensor: Tensor, sizes: list[int], parts: list[Tensor] | None) -> None:
        ranks = self.world_size
        addresses = None if parts is None else (ctypes.c_void_p * ranks)(*(part.data_ptr() for part in parts))
        lengths = (ctypes.c_size_t * ranks)(*sizes)
        with span("communicate: gather"):
            code = self._library.rz_ring_gather(self._ring, tensor.data_ptr(), lengths, addresses, self.timeout_ns)
        self._check(code)

    def _check(self, code: int) -> None:
        if code:
            raise _lost(code, self._timeout)


def _library() -> Any:
    library = compiled()
    if library is None:
        raise ConfigurationError(
            "The shared memory collectives have not been compiled on this host; install a C compiler (gcc), "
            "or use --collectives gloo."
        )
    return library


def _lost(code: int, timeout: float) -> RingLost:
    reason = _REASONS[code].format(timeout=timeout)
    return RingLost(f"A rank of the ring is gone ({reason}); the ring is restarted and the request continues.")

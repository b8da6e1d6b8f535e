"""How much of this machine a process may have: cores, memory, and how fast all of them read it."""

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BUFFER = 192 << 20  # bytes: more than caches hold
_MEASURED = 1.0  # seconds


def cores() -> int:
    """That this process may run on; a container's share of them where that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota()))


def _quota() -> int:
    """Cores by the container's limit of CPU time; many where it has none."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 20 if limit == "max" else -(-int(limit) // int(period))
    except (OSError, ValueError):
        return 1 << 20


def memory_left() -> int:
    """Bytes that a container's limit leaves; many where there is none."""
    try:
        root = Path("/sys/fs/cgroup")
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return 1 << 62 if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 1 << 62


def existing(place: Path) -> Path:
    """`place`, or the nearest directory above it that is there."""
    while not place.exists():
        place = place.parent
    return place


def read_rate(threads: int, seconds: float = _MEASURED, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that `threads` read together. Comparing two equal buffers reads both, and does nothing else."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    share = _BUFFER // threads // 2
    buffers = [(ctypes.create_string_buffer(share), ctypes.create_string_buffer(share)) for _ in range(threads)]
    for first, second in buffers:  # pages of zeros are one page until they are written
        ctypes.memset(first, 1, share)
        ctypes.memset(second, 1, share)

    def work(pair: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]) -> int:
        read = 0
        while clock() < end:
            compare(*pair, share)
            read += 2 * share
        return read

    begin = clock()
    end = begin + seconds
    with ThreadPoolExecutor(threads) as pool:
        read = sum(pool.map(work, buffers))
    return read / max(clock() - begin, 1e-9)

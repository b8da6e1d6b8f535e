"""Which GPU there is, by the driver: without torch, whose import takes seconds and which may be one for CPUs.

Whether Triton's kernels are compiled or interpreted: told to Triton before anything imports it.

Kernels, and Triton's own functions that they call, are decorated when their modules are imported; what the environment
says later comes too late for them. Whoever imports kernels outside of a server calls `choose` first.
"""

import contextlib
import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path

NAME_BYTES = 128


@lru_cache(maxsize=1)
def card() -> str | None:
    """The first GPU's name, and how many there are; None where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    if library.cuDeviceGetName(name, NAME_BYTES, 0):
        return None
    found = name.value.decode(errors="replace")
    return f"{count.value} x {found}" if count.value > 1 else found


def driver() -> str:
    """The kernel module's version, else the newest CUDA that the driver knows."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
            return found.group()
    with contextlib.suppress(OSError):
        number = ctypes.c_int()
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    return "unknown"


VARIABLE = "TRITON_INTERPRET"


def choose() -> None:
    """Interprets kernels where there is no NVIDIA GPU, unless the environment says something already."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault(VARIABLE, "1")


def interprets() -> bool:
    """Whether kernels run on CPU tensors."""
    return os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes", "on", "y")

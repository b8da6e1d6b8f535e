"""What a process gives back to the system of the memory that it no longer uses (glibc's malloc; elsewhere nothing)."""

import ctypes
import sys
from collections.abc import Callable

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_OWN_MAPPING = 1 << 20
"""Bytes from which a block has a mapping of its own, which goes back when it is freed. glibc would raise the bound
with each such block that is freed, to 32 MiB."""
_ARENAS = 2


def _function(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function


_trim, _option = _function("malloc_trim"), _function("mallopt")


def keep_little() -> None:
    """For a process of a few threads, early: few heaps, and large blocks outside of them."""
    if _option is not None:
        _option(_M_ARENA_MAX, _ARENAS)
        _option(_M_MMAP_THRESHOLD, _OWN_MAPPING)


def give_back() -> None:
    """Returns freed pages to the system: some milliseconds, in which other threads run."""
    if _trim is not None:
        _trim(0)

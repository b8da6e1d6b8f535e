"""Processes of this machine: children that never outlive their parent, where a process id means something, and
what a process gives back to the system of the memory that it no longer uses (glibc's malloc; elsewhere nothing) or
need not look through.
"""

import contextlib
import ctypes
import functools
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel send `number` to the child when its parent dies.

    So a stack whose head is killed leaves nothing running. None where the kernel cannot (not Linux).
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return arm


@functools.cache
def pid_namespace() -> str:
    """The same for all processes that know each other by their ids: those of one boot of a machine, outside of
    containers or in the same one. Empty where that cannot be found out."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


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


def freeze_gc_after_startup() -> None:
    """Once a process has started: what it has loaded stays, and need not be looked through time and again.

    Python's garbage collector only finds cycles, which a request leaves few of; by default it looks for them
    every 700 allocations, and at times through everything, which stops the event loop for milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)

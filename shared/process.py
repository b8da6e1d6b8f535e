"""The process and its machine: the version that it runs, children that never outlive their parent, where a process id
means something, memory that goes back to the system (glibc's malloc) or that the garbage collector need not look
through, and hang detection by progress counters: a slow rank is never taken for a hung one.
"""

import contextlib
import ctypes
import functools
import gc
import signal
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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
# Bytes from which a block has a mapping of its own, which goes back when it is freed. glibc would raise the bound
# with each such block that is freed, to 32 MiB.
_OWN_MAPPING = 1 << 20
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


Counters = tuple[int, ...]

# A key that has not been observed for this many times the limit is dropped when another one comes.
_KEEP = 2.0


@dataclass(slots=True)
class _Seen:
    state: tuple[Counters, bool]  # the counters, and whether they must move
    since: float  # when they were first seen like this
    observed: float


class ProgressWatch:
    """Remembers, per key, since when its counters stand still. Pure: time comes in as an argument.

    Only what was observed counts: a key stands still from the first observation to the last one that
    show the same counters with work in flight. Silence proves nothing.
    """

    def __init__(self, limit: float) -> None:
        """`limit`: seconds."""
        self._limit = limit
        self._seen: dict[Hashable, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def stands_still(self, key: Hashable, counters: Counters, in_flight: bool, now: float) -> bool:
        """Notes `counters` at `now` (seconds); True when `key` has been stuck for the limit or longer."""
        state = (counters, in_flight)
        seen = self._seen.get(key)
        if seen is None:
            self._drop_unobserved(now)
        if seen is None or seen.state != state or not in_flight:
            self._seen[key] = _Seen(state, now, now)
            return False
        seen.observed = now
        return now - seen.since >= self._limit

    def _drop_unobserved(self, now: float) -> None:
        before = now - _KEEP * self._limit
        for key in [key for key, seen in self._seen.items() if seen.observed < before]:
            del self._seen[key]


def _installed() -> str:
    try:
        return version("ryzanstein")
    except PackageNotFoundError:  # run from a tree that was not installed
        return "0"


VERSION = _installed()

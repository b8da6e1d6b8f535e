"""Named ranges of a step for a profiler, where one is at work; else they cost a look at a variable.

A process is one rank, and a rank has one profiler: hence state of the module.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Watcher(Protocol):
    """Whoever is told of steps, in the thread that computes them."""

    def before_step(self, step: int) -> None: ...

    def idle(self) -> None: ...


_nothing: AbstractContextManager[object] = contextlib.nullcontext()
_make: Callable[[str], AbstractContextManager[object]] | None = None
_watcher: Watcher | None = None
# Seconds that the native kernels have spent on each part of the steps so far, where they compute.
native_spent: Callable[[], dict[str, float]] | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A range of that name around what is in the context."""
    return _nothing if _make is None else _make(name)


def before_step(step: int) -> None:
    if _watcher is not None:
        _watcher.before_step(step)


def idle() -> None:
    """Called by the thread that computes steps while it has none and `watched()`."""
    if _watcher is not None:
        _watcher.idle()


def watched() -> bool:
    return _watcher is not None


def watch(watcher: Watcher | None) -> None:
    """Tells `watcher` of steps from now on, instead of whoever was told before."""
    global _watcher
    _watcher = watcher


def count_native(spent: Callable[[], dict[str, float]]) -> None:
    """Where to learn what the native kernels spend."""
    global native_spent
    native_spent = spent


def name_ranges(make: Callable[[str], AbstractContextManager[object]] | None) -> None:
    """Has `span` give what `make` makes of its name; None: nothing."""
    global _make
    _make = make

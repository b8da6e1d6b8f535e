"""Processes of this machine: children that never outlive their parent, and where a process id means something."""

import contextlib
import ctypes
import functools
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

"""A Python process in which a seed always gives the same run: hashes and addresses are the same in each.

    ensure() ── strings hashed without a secret? addresses not drawn? ──no──▶ personality, environment, exec, ensure()

Sets of strings iterate by hash, sets of other objects by address. Tasks are hashed by number anyway (`core/loop.py`).
"""

import ctypes
import os
import sys

ENVIRONMENT = {"PYTHONHASHSEED": "0", "TZ": "UTC"}  # of processes that simulate
_TRIED = "RYZANSTEIN_SIMULATION_STARTED_AGAIN"
_NO_RANDOMIZE = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)
_ASK = 0xFFFFFFFF


def ensure() -> None:
    """Starts this process again, as it was started, where it is not reproducible. Call it first of all.

    Where the machine forbids to give addresses out in the same order (containers with a filter of system calls), the
    process goes on without; `fixed_addresses` says so, for whoever sees two digests of a seed.
    """
    as_wanted = ENVIRONMENT.items() <= os.environ.items()
    if as_wanted and (fixed_addresses() or _TRIED in os.environ):
        return
    _personality(_personality(_ASK) | _NO_RANDOMIZE)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ENVIRONMENT | {_TRIED: "1"})


def fixed_addresses() -> bool:
    """Whether this process's memory lies where that of each process like it lies."""
    return bool(_personality(_ASK) & _NO_RANDOMIZE)


def _personality(wanted: int) -> int:
    """The one before. Where the call is refused or unknown: 0, which is everybody's usual one."""
    try:
        before = int(ctypes.CDLL(None).personality(ctypes.c_ulong(wanted)))
    except (AttributeError, OSError):
        return 0
    return max(0, before)

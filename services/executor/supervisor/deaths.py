"""Why a ring has died, and which requests may have made it die.

    external        killed or stopped from outside, cut off, told to leave, its GPU or its link lost
    out_of_memory   of the host (the kernel has killed a rank), or of a GPU
    crashed         ended by a signal of its own making, by an error in a step, or without a word
    hung            a step that goes on for ever

Of any but the first, the requests in the steps under way are suspected: others were not being computed.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

from services.executor.core.gpu_errors import CRASHED, EXTERNAL, OUT_OF_MEMORY
from services.executor.ipc.flight_recorder import PlanRecord
from shared.messages import RingDeath

_OWN_SIGNALS = frozenset(
    (
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
_AT_ONCE = 2
"""Steps that may be under way at a time."""


def cause_of_exit(code: int, oom_kills: int) -> str:
    """Of a rank that ended with `code` (negative: a signal), while the kernel killed `oom_kills` processes of its
    container because memory had run out."""
    if code >= 0 or -code in _OWN_SIGNALS:
        return CRASHED
    return OUT_OF_MEMORY if -code == signal.SIGKILL and oom_kills > 0 else EXTERNAL


def death_of(epoch: int, cause: str, plans: Sequence[PlanRecord]) -> RingDeath:
    """What is told of the end of ring `epoch`, whose last plans are `plans`, by step."""
    if cause == EXTERNAL:
        return RingDeath(epoch, cause)
    under_way = [plan for plan in plans[-_AT_ONCE:] if not plan.seconds]
    named = {one.generation_id for plan in under_way for one in plan.sequences if one.generation_id}
    more = any(len(plan.sequences) < plan.sequence_count for plan in under_way) or any(
        not one.generation_id for plan in under_way for one in plan.sequences
    )
    return RingDeath(epoch, cause, sorted(named), more)


def oom_kills() -> int:
    """Processes that the kernel has killed so far for want of memory: in this process's container where it has a
    control group of its own, else on this host."""
    for path, word in ((_memory_events(), "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        try:
            lines = path.read_text(encoding="ascii").splitlines() if path is not None else []
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == word:
                return int(count)
    return 0


def _memory_events() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
    return None

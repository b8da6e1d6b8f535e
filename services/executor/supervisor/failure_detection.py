"""Whether a ring is hung, in its steps or while it loads, by what its board shows; and of one that has ended why, and
which requests may have made it end. Time comes in.

A rank is hung when its counters stand still with a step in flight; the leader also when its event loop does
not turn, and rank 0 computes nothing meanwhile: a loop that gets no turn beside a long step is busy.

A ring ends for one of these causes:

    external        killed or stopped from outside, cut off, told to leave, its GPU or its link lost
    out_of_memory   of the host (the kernel has killed a rank), or of a GPU
    crashed         ended by a signal of its own making, by an error in a step, or without a word
    hung            a step that goes on for ever

Of any but the first, the requests in the steps under way are suspected: others were not being computed.
"""

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.executor.core.gpu_errors import CRASHED, EXTERNAL, OUT_OF_MEMORY
from services.executor.ipc.board import Loading
from shared.messages import RankBeat, RingDeath
from shared.messages.debugging import PlanDump
from shared.process import ProgressWatch

# Seconds in which a rank that loads must read some of its weights. It tells of each two hundredth of them: of 100 GB
# at least 4 MB a second, which any storage gives that is worth loading from.
STALLED_AFTER = 120.0


class _Watch:
    """Of one ring after the other, each under its epoch."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds without progress."""
        self._limit = limit
        self._watch = ProgressWatch(limit)
        self._looked: float | None = None

    def _look(self, now: float) -> ProgressWatch:
        if self._looked is not None and now - self._looked >= self._limit:
            # We stood still ourselves, perhaps with everybody else: what was seen before proves nothing.
            self._watch = ProgressWatch(self._limit)
        self._looked = now
        return self._watch


class RingWatch(_Watch):
    def verdict(self, epoch: int, loop_beats: int, ranks: Iterable[RankBeat], now: float) -> str:
        """Why the ring is hung, at `now` (monotonic seconds); empty while it is not."""
        watch, reason = self._look(now), ""
        work: tuple[int, ...] = ()
        for beat in ranks:
            counters = (beat.step, beat.progress)
            if beat.rank == 0:
                work = counters
            if watch.stands_still((epoch, beat.rank), counters, beat.in_flight, now):
                reason = reason or f"rank {beat.rank} (process {beat.pid}) is hung in step {beat.step + 1}"
        if watch.stands_still((epoch, "loop"), (loop_beats, *work), True, now):
            return "the leader has stood still"
        return reason


class LoadWatch(_Watch):
    """Watches the ranks of a ring read their weights. What comes before and behind that (a download, the ranks'
    meeting, kernels that are compiled) tells of no progress, and is not judged."""

    def __init__(self, limit: float = STALLED_AFTER) -> None:
        super().__init__(limit)

    def verdict(self, epoch: int, ranks: Iterable[Loading], now: float) -> str:
        """Why the ring does not load, at `now` (monotonic seconds); empty while it does."""
        watch, reason = self._look(now), ""
        for one in ranks:
            if watch.stands_still((epoch, one.rank), (one.done,), one.done < one.total, now):
                reason = reason or (
                    f"rank {one.rank} (process {one.pid}) has read nothing for {self._limit:g} s, after "
                    f"{one.done / one.total:.0%} of its weights: look at the storage of the model and at the GPU"
                )
        return reason


_OWN_SIGNALS = frozenset(getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS"))
_AT_ONCE = 2  # steps that may be under way at a time


def cause_of_exit(code: int, oom_kills: int) -> str:
    """Of a rank that ended with `code` (negative: a signal), while the kernel killed `oom_kills` processes of its
    container because memory had run out."""
    if code >= 0 or -code in _OWN_SIGNALS:
        return CRASHED
    return OUT_OF_MEMORY if -code == signal.SIGKILL and oom_kills > 0 else EXTERNAL


def death_of(epoch: int, cause: str, plans: Sequence[PlanDump]) -> RingDeath:
    """What is told of the end of ring `epoch`, whose last plans are `plans`, by step."""
    if cause == EXTERNAL:
        return RingDeath(epoch, cause)
    under_way = [plan for plan in plans[-_AT_ONCE:] if not plan.ms]
    named = {one.generation_id for plan in under_way for one in plan.sequences if one.generation_id}
    more = any(len(plan.sequences) < plan.sequence_count for plan in under_way) or any(
        not one.generation_id for plan in under_way for one in plan.sequences
    )
    return RingDeath(epoch, cause, sorted(named), more)


def oom_kills() -> int:
    """Processes that the kernel has killed so far for want of memory: in this process's container where it has a
    control group of its own, else on this host."""
    for path in (*_memory_events(), Path("/proc/vmstat")):
        for line in _lines(path):
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _memory_events() -> list[Path]:
    groups = (line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::"))
    return [Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events" for group in groups]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

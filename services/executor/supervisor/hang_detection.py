"""Whether a ring is hung, in its steps or while it loads, by what its board shows. Pure: time comes in.

A rank is hung when its counters stand still with a step in flight; the leader also when its event loop does
not turn, and rank 0 computes nothing meanwhile: a loop that gets no turn beside a long step is busy.
"""

from collections.abc import Iterable

from services.executor.ipc.board import Loading
from shared.messages import RankBeat
from shared.progress import ProgressWatch

STALLED_AFTER = 120.0
"""Seconds in which a rank that loads must read some of its weights. It tells of each two hundredth of them: of 100 GB
at least 4 MB a second, which any storage gives that is worth loading from."""


class RingWatch:
    """Watches one ring after the other, each under its epoch."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds without progress."""
        self._limit = limit
        self._watch = ProgressWatch(limit)
        self._looked: float | None = None

    def verdict(self, epoch: int, loop_beats: int, ranks: Iterable[RankBeat], now: float) -> str:
        """Why the ring is hung, at `now` (monotonic seconds); empty while it is not."""
        if self._looked is not None and now - self._looked >= self._limit:
            # We stood still ourselves, perhaps with everybody else: what was seen before proves nothing.
            self._watch = ProgressWatch(self._limit)
        self._looked = now
        reason = ""
        work: tuple[int, ...] = ()
        for beat in ranks:
            counters = (beat.step, beat.progress)
            if beat.rank == 0:
                work = counters
            if self._watch.stands_still((epoch, beat.rank), counters, beat.in_flight, now):
                reason = reason or f"rank {beat.rank} (process {beat.pid}) is hung in step {beat.step + 1}"
        if self._watch.stands_still((epoch, "loop"), (loop_beats, *work), True, now):
            return "the leader has stood still"
        return reason


class LoadWatch:
    """Watches the ranks of one ring after the other read their weights. What comes before and behind that (a download,
    the ranks' meeting, kernels that are compiled) tells of no progress, and is not judged."""

    def __init__(self, limit: float = STALLED_AFTER) -> None:
        """`limit`: seconds without progress."""
        self._limit = limit
        self._watch = ProgressWatch(limit)
        self._looked: float | None = None

    def verdict(self, epoch: int, ranks: Iterable[Loading], now: float) -> str:
        """Why the ring does not load, at `now` (monotonic seconds); empty while it does."""
        if self._looked is not None and now - self._looked >= self._limit:
            self._watch = ProgressWatch(self._limit)  # we stood still ourselves
        self._looked = now
        reason = ""
        for one in ranks:
            if self._watch.stands_still((epoch, one.rank), (one.done,), one.done < one.total, now):
                reason = reason or (
                    f"rank {one.rank} (process {one.pid}) has read nothing for {self._limit:g} s, after "
                    f"{one.done / one.total:.0%} of its weights: look at the storage of the model and at the GPU"
                )
        return reason

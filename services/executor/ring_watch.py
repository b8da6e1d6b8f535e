"""Whether a ring is hung, by what its board shows. Pure: time comes in.

A rank is hung when its counters stand still with a step in flight; the leader also when its event loop does
not turn, and rank 0 computes nothing meanwhile: a loop that gets no turn beside a long step is busy.
"""

from collections.abc import Iterable

from shared.messages import RankBeat
from shared.progress import ProgressWatch


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

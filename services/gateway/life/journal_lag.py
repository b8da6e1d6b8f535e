"""How far the journal is behind: the time that it takes to store what this gateway gives it to keep.

    given ──── stored            a record's way: its length is the lag while it is among the last `WINDOW` seconds
    given ─────────────── now    one that is not stored yet counts with its age

No clock: the time (seconds, monotonic) comes in.
"""

from collections import deque

WINDOW = 10.0
"""Seconds for which a record that took long is told: longer than any scrape interval that is of use."""


class JournalLag:
    """Records are stored in the order in which they were given."""

    def __init__(self) -> None:
        self._waiting: deque[float] = deque()
        self._slowest: deque[tuple[float, float]] = deque()
        """(when it was stored, how long that took): of each second the slowest."""

    def given(self, now: float) -> None:
        self._waiting.append(now)

    def stored(self, now: float) -> None:
        """The oldest that waits is stored, or never will be."""
        took = now - self._waiting.popleft()
        if self._slowest and now - self._slowest[-1][0] < 1:
            at, slowest = self._slowest.pop()
            self._slowest.append((at, max(took, slowest)))
        else:
            self._slowest.append((now, took))
            self._forget(now)

    def seconds(self, now: float) -> float:
        """0 when nothing was given lately."""
        self._forget(now)
        waits = now - self._waiting[0] if self._waiting else 0.0
        return max(waits, max((took for _, took in self._slowest), default=0.0))

    def _forget(self, now: float) -> None:
        while self._slowest and now - self._slowest[0][0] > WINDOW:
            self._slowest.popleft()

"""Spans of time, outages, and stretches in which every request failed. Pure; times are unix seconds."""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """From `begin` to `end`, which does not belong to it."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order, without empty ones."""
    union: list[Interval] = []
    for one in sorted(one for one in intervals if one.end > one.begin):
        if union and one.begin <= union[-1].end:
            union[-1] = Interval(union[-1].begin, max(union[-1].end, one.end))
        else:
            union.append(one)
    return union


def seconds_of(intervals: Iterable[Interval]) -> float:
    """How long their union is."""
    return sum(one.seconds for one in merged(intervals))


class Repairs(NamedTuple):
    """Outages whose end was seen."""

    number: int
    seconds: float

    @property
    def mean(self) -> float | None:
        """The mean time to recovery; None: nothing had to be repaired."""
        return self.seconds / self.number if self.number else None


def repairs(outages: Iterable[Interval], covered: Iterable[Interval]) -> Repairs:
    """Of outages that began and ended within one of the `covered` intervals: of one that reaches over an edge of
    what was recorded, nobody knows how long it was."""
    edges = merged(covered)
    whole = [
        one for one in merged(outages) if any(edge.begin < one.begin and one.end < edge.end for edge in edges)
    ]
    return Repairs(len(whole), seconds_of(whole))


IN_A_ROW = 3
"""Failures without a success between them that make an outage: fewer are errors, and stand in the error rate."""


class FailingRuns:
    """From the first of several failures in a row until the next success.

    ok  ok  bad  ok  bad  bad  bad   ok
                     └── outage ─────┘
    """

    def __init__(self) -> None:
        self._failures = 0
        self._begin = 0.0
        self._ended: list[Interval] = []

    def bad(self, at: float) -> None:
        """A request failed."""
        if not self._failures:
            self._begin = at
        self._failures += 1

    def good(self, at: float) -> None:
        """A request succeeded."""
        if self._failures >= IN_A_ROW:
            self._ended.append(Interval(self._begin, at))
        self._failures = 0

    def outages(self, until: float) -> list[Interval]:
        """Those so far, at the time `until`."""
        going_on = [Interval(self._begin, until)] if self._failures >= IN_A_ROW else []
        return self._ended + going_on

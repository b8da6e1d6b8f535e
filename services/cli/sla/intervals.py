"""Spans of time, and what outages are made of. Pure; times are unix seconds."""

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

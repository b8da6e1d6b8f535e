"""Samples of Prometheus, read as what they count. Pure.

`increase()` extrapolates, and does not see a series' first value: an error that happens once is the first value of
its series. So increases are taken from the samples themselves:

    value   ·   3 → 5 → 1 → 2        5 - 3, a restart, 1, 1: in all 4
            └ not there before: from 0, since the process that has it was new or had counted nothing yet
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.cli.sla.intervals import Interval, merged

Samples = list[tuple[float, float]]


class Series(NamedTuple):
    """Values by their moments (unix seconds), in order."""

    labels: dict[str, str]
    samples: Samples


def increases(samples: Sequence[tuple[float, float]], known_since: float) -> Iterator[tuple[float, float]]:
    """How much a counter grew until each moment. A series that was not there at `known_since`, when the source
    was there already, began at 0."""
    previous: float | None = None
    for at, value in samples:
        if previous is None:
            if at > known_since:
                yield at, value
        elif value >= previous:
            yield at, value - previous
        else:
            yield at, value
        previous = value


def growth(series: Series, known_since: float) -> float:
    """How much a counter grew in all."""
    return sum(amount for _, amount in increases(series.samples, known_since))


def spans(samples: Iterable[tuple[float, float]], step: float) -> list[Interval]:
    """When a condition held (its value is above 0): each sample speaks for the `step` seconds before it."""
    return merged((Interval(at - step, at) for at, value in samples if value > 0), within=step / 2)


def total(series: Iterable[Series]) -> Samples:
    """Their sum, wherever one of them has a value."""
    sums: dict[float, float] = {}
    for one in series:
        for at, value in one.samples:
            sums[at] = sums.get(at, 0.0) + value
    return sorted(sums.items())

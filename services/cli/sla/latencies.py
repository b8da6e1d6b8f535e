"""Percentiles in little room. Pure; seconds.

Two sources, one result: a `Quantile` says between which bounds the exact value lies.

    journal      each value falls into a bucket that is 1% wide: known within 1%, whatever the number of values
    Prometheus   counts of a few wide buckets: known within its bucket, interpolated as histogram_quantile does
"""

import math
from collections.abc import Mapping

import msgspec

GROWTH = 1.01
"""Upper over lower bound of a bucket."""
SMALLEST = 1e-6
"""Seconds; what is shorter counts as this."""
PERCENTILES = (50, 95, 99)

_LOG = math.log(GROWTH)


class Quantile(msgspec.Struct, frozen=True):
    """A percentile of latencies, in seconds."""

    value: float
    at_least: float
    """The exact one is not less."""
    at_most: float | None
    """Nor more; None: it was longer than the source tells."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of so many values; without values there are none."""

    count: int
    p50: Quantile | None = None
    p95: Quantile | None = None
    p99: Quantile | None = None


class Latencies:
    """Values in buckets of 1% each: the memory that it takes does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self.buckets: dict[int, int] = {}
        """How many values are at most GROWTH to the power of the key, and more than to that of the one before."""

    def add(self, seconds: float) -> None:
        self.count += 1
        bucket = math.ceil(math.log(max(seconds, SMALLEST)) / _LOG)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: "Latencies") -> None:
        self.count += other.count
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def quantile(self, percent: float) -> Quantile | None:
        """The nearest rank: the smallest value that `percent` of all values do not exceed."""
        rank, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                low, high = GROWTH ** (bucket - 1), GROWTH**bucket
                return Quantile((low + high) / 2, low, high)
        return None

    def percentiles(self) -> Percentiles:
        return Percentiles(self.count, *map(self.quantile, PERCENTILES))


def bucket_quantile(counts: Mapping[float, float], percent: float) -> Quantile | None:
    """From how many values were at most as long as each bound (cumulative; one bound is infinity).

    As Prometheus' `histogram_quantile`: linear within the bucket, the last finite bound for what lies behind it.
    """
    bounds = sorted(counts)
    if not bounds or not math.isinf(bounds[-1]) or counts[bounds[-1]] <= 0:
        return None
    rank, below, lower = counts[bounds[-1]] * percent / 100, 0.0, 0.0
    for bound in bounds:
        count = max(counts[bound], below)  # increases of different buckets need not be of the same moment
        if count >= rank and count > below:
            if math.isinf(bound):
                return Quantile(lower, lower, None)
            value = lower + (bound - lower) * max(0.0, rank - below) / (count - below)
            return Quantile(value, lower, bound)
        below, lower = count, bound
    return Quantile(lower, lower, None)


def bucket_percentiles(counts: Mapping[float, float]) -> Percentiles:
    """All percentiles of a histogram's counts."""
    count = round(max(counts.values(), default=0.0))
    return Percentiles(count, *(bucket_quantile(counts, percent) for percent in PERCENTILES))

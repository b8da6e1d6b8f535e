"""Ratios of one run against recorded ones: what is a regression, and what is noise. Pure.

better ◀────────────── recorded ───┬─ margin ─┬─ 3 standard errors of both medians ─▶ worse: a regression
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

MARGIN = 0.05
"""Of a ratio: a change that is smaller is not worth an alarm."""
ERRORS = 3.0
"""Standard errors that noise may make; of five measures in a thousand runs one is so far off."""
MIN_ROUNDS = 3
"""Rounds without which nothing is judged."""

Better = Literal["more", "less"]
Verdict = Literal["equal", "better", "worse", "not recorded"]


class Ratio(msgspec.Struct, frozen=True):
    """A ratio as it was measured in several rounds."""

    median: float
    spread: float
    """Standard deviation of one round, by the median absolute deviation: one disturbed round changes nothing."""
    rounds: int

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Ratio":
        """Raises ValueError where there are too few rounds, or one is no ratio."""
        if len(rounds) < MIN_ROUNDS or not all(0 < one < math.inf for one in rounds):
            raise ValueError(
                f"A ratio needs {MIN_ROUNDS} rounds or more, each above 0; there are {list(rounds)}."
            )
        median = statistics.median(rounds)
        deviation = statistics.median(abs(one - median) for one in rounds)
        return cls(median, 1.4826 * deviation, len(rounds))

    @property
    def error(self) -> float:
        """Standard error of the median."""
        return 1.2533 * self.spread / math.sqrt(self.rounds)


class Recorded(msgspec.Struct, frozen=True):
    """What `--record` writes."""

    commit: str
    date: str
    machine: str
    """Ratios of another kind of machine are told, and decide nothing."""
    ratios: dict[str, Ratio]


class Finding(msgspec.Struct, frozen=True):
    """One ratio against the one that was recorded."""

    name: str
    now: Ratio
    before: Ratio | None
    limit: float | None
    """Beyond this it is worse."""
    verdict: Verdict


def compare(
    now: Mapping[str, Ratio], before: Mapping[str, Ratio], better: Mapping[str, Better]
) -> list[Finding]:
    """Every ratio of this run; `better`: whether more of it is good."""
    return [_compare(name, ratio, before.get(name), better[name]) for name, ratio in now.items()]


def _compare(name: str, now: Ratio, before: Ratio | None, better: Better) -> Finding:
    if before is None:
        return Finding(name, now, None, None, "not recorded")
    slack = MARGIN * before.median + ERRORS * math.hypot(now.error, before.error)
    sign = 1 if better == "more" else -1
    gained = sign * (now.median - before.median)
    verdict: Verdict = "worse" if gained < -slack else "better" if gained > slack else "equal"
    return Finding(name, now, before, before.median - sign * slack, verdict)


def left_out(now: Mapping[str, Ratio], before: Mapping[str, Ratio]) -> list[str]:
    """Ratios that were recorded and not measured: a measure that broke must not pass for a good one."""
    return sorted(set(before) - set(now))

"""The period that is asked for, and spans of time in it: outages, runs of failed requests. Pure; unix seconds."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shared.config import seconds_of
from shared.errors import ConfigurationError


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


def length_of(intervals: Iterable[Interval]) -> float:
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
    return Repairs(len(whole), length_of(whole))


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


_RELATIVE = re.compile(r"(?:now)?\s*-\s*(\S+)|(\S+)\s+ago")
_DAYS = {"today": 0, "yesterday": 1}
EXAMPLES = "2026-03-01, 2026-03-01T12:30+01:00, now, yesterday, -24h or '90m ago'"


def span_of(text: str, option: str) -> float:
    """Seconds of `text`, like 24h, 90m, 1h30m or 7d. Raises `ConfigurationError`."""
    seconds = seconds_of(text)
    if seconds is None:
        raise ConfigurationError(f"{option} cannot be {text!r}; it is a time like 90m, 24h, 1h30m or 7d.")
    return seconds


def zone_of(name: str) -> tzinfo:
    """The time zone of that name (UTC, Europe/Zurich); empty: this machine's. Raises `ConfigurationError`."""
    if not name:
        return datetime.now(UTC).astimezone().tzinfo or UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigurationError(
            f"--timezone cannot be {name!r}; it is a name like UTC or Europe/Zurich, of the system's database."
        ) from None


def moment_of(text: str, now: float, zone: tzinfo, option: str) -> float:
    """Unix seconds. A date alone is its beginning; what names no zone is of `zone`.

    Raises `ConfigurationError`.
    """
    given = text.strip()
    lower = given.lower()
    if lower == "now":
        return now
    if lower in _DAYS:
        day = datetime.fromtimestamp(now, zone).date() - timedelta(days=_DAYS[lower])
        return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()
    if relative := _RELATIVE.fullmatch(lower):
        return now - span_of(relative[1] or relative[2], option)
    try:
        moment = datetime.fromisoformat(given)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError):
        seconds = -1.0
    if seconds < 0:
        raise ConfigurationError(f"{option} cannot be {text!r}; it is a time like {EXAMPLES}.")
    return seconds


def period_of(begin: str, end: str, last: str, now: float, zone: tzinfo) -> Interval:
    """What --from, --to and --last ask for; without any of them, the last 24 hours. Raises `ConfigurationError`."""
    if begin and last:
        raise ConfigurationError("--from and --last both say where the period begins; name one.")
    to = moment_of(end, now, zone, "--to") if end else now
    since = moment_of(begin, now, zone, "--from") if begin else to - span_of(last or "24h", "--last")
    if since >= to:
        raise ConfigurationError(
            f"The period is empty: it would begin at {shown(since, zone)} and end at {shown(to, zone)}."
        )
    if since >= now:
        raise ConfigurationError(f"The period is in the future: it starts at {shown(since, zone)}.")
    return Interval(since, min(to, now))


def shown(moment: float, zone: tzinfo) -> str:
    """For people: ISO 8601 to the second, with its offset."""
    return datetime.fromtimestamp(moment, zone).isoformat(sep=" ", timespec="seconds")

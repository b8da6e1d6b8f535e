"""The period that is asked for, from the command line's words. Pure; unix seconds."""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shared.config import seconds_of
from shared.errors import ConfigurationError

EXAMPLES = "2026-03-01, 2026-03-01T12:30+01:00, now, yesterday, -24h or '90m ago'"
_RELATIVE = re.compile(r"(?:now)?\s*-\s*(\S+)|(\S+)\s+ago")
_MILLISECONDS = re.compile(r"(\d+(?:\.\d+)?)ms", re.ASCII)
_DAYS = {"today": 0, "yesterday": 1}


class Interval(NamedTuple):
    """From `begin` to `end`, which does not belong to it."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


def span_of(text: str, option: str) -> float:
    """Seconds of `text`, like 24h, 90m, 1h30m, 7d or 200ms. Raises `ConfigurationError`."""
    part = _MILLISECONDS.fullmatch(text)
    seconds = float(part[1]) / 1e3 if part else seconds_of(text)
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
    """Unix seconds. A date alone is its beginning; what names no zone is of `zone`. Raises `ConfigurationError`."""
    given = text.strip()
    if given.lower() == "now":
        return now
    if relative := _RELATIVE.fullmatch(given.lower()):
        return now - span_of(relative[1] or relative[2], option)
    if (days := _DAYS.get(given.lower())) is not None:
        given = str(datetime.fromtimestamp(now, zone).date() - timedelta(days=days))
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
            f"The period is empty: it would begin at {local_time(since, zone)} and end at {local_time(to, zone)}."
        )
    if since >= now:
        raise ConfigurationError(f"The period is in the future: it starts at {local_time(since, zone)}.")
    return Interval(since, min(to, now))


def local_time(moment: float, zone: tzinfo) -> str:
    """For people: ISO 8601 to the second, with its offset."""
    return datetime.fromtimestamp(moment, zone).isoformat(sep=" ", timespec="seconds")

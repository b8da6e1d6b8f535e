"""Which period is asked for."""

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.periods import Interval, local_time, moment_of, period_of, span_of, zone_of
from shared.errors import ConfigurationError

NOW = datetime(2026, 3, 29, 12, 0, tzinfo=UTC).timestamp()
ZURICH = ZoneInfo("Europe/Zurich")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("24h", 86_400), ("1h30m", 5400), ("7d", 604_800), (" 1.5H ", 5400)]
)
def test_spans(text: str, seconds: float) -> None:
    assert span_of(text, "--last") == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0h", "1y", "1h 30m x", "99999999d", "٣h"])
def test_what_is_no_span_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--last cannot be .*like 90m"):
        span_of(text, "--last")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("-24h", NOW - 86_400),
        ("now-90m", NOW - 5400),
        ("now - 90m", NOW - 5400),
        ("90m ago", NOW - 5400),
        ("2026-03-29T10:00:00Z", NOW - 7200),
        ("2026-03-29T12:00+02:00", NOW - 7200),
        ("2026-03-29T14:00", NOW),  # Zurich has summer time since that morning
        ("2026-03-29", NOW - 13 * 3600),
        ("today", NOW - 13 * 3600),
        ("yesterday", NOW - 37 * 3600),
    ],
)
def test_moments(text: str, expected: float) -> None:
    assert moment_of(text, NOW, ZURICH, "--from") == expected


@pytest.mark.parametrize("text", ["soon", "2026-13-01", "-x", "1700000000000", "ago", "24h", "0001-01-01T00:00+23:00"])
def test_what_is_no_moment_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be"):
        moment_of(text, NOW, UTC, "--from")


@given(st.integers(0, 4_000_000_000), st.integers(-12, 14))
def test_what_is_shown_is_read_again(moment: int, hours: int) -> None:
    zone = timezone(timedelta(hours=hours))
    assert moment_of(local_time(moment, zone), NOW, UTC, "--to") == moment


def test_periods() -> None:
    assert period_of("", "", "", NOW, UTC) == Interval(NOW - 86_400, NOW)
    assert period_of("", "", "2h", NOW, UTC) == Interval(NOW - 7200, NOW)
    assert period_of("", "-1h", "2h", NOW, UTC) == Interval(NOW - 3 * 3600, NOW - 3600)
    assert period_of("-2h", "2027-01-01", "", NOW, UTC) == Interval(NOW - 7200, NOW), "no further than now"


@pytest.mark.parametrize(
    ("begin", "end", "last", "said"),
    [
        ("-1h", "-2h", "", "is empty"),
        ("-1h", "", "1h", "name one"),
        ("2027-01-01", "2027-01-02", "", "is in the future"),
    ],
)
def test_periods_that_are_none(begin: str, end: str, last: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        period_of(begin, end, last, NOW, UTC)


def test_zones() -> None:
    assert zone_of("Europe/Zurich") == ZURICH
    assert zone_of("") is not None
    for name in ("Mars/Olympus", "../etc/passwd", "/etc/passwd"):
        with pytest.raises(ConfigurationError, match="--timezone"):
            zone_of(name)

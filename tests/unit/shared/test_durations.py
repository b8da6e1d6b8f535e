"""Durations as people write them."""

import pytest

from shared.config import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("2w", 1_209_600), ("1h30m", 5400), ("1.5h", 5400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "0s", "-1m", "1 h", "h", "1x", "1h30", "1234567s", "1.5", "٣s"])
def test_what_is_none(text: str) -> None:
    assert seconds_of(text) is None

"""Durations as people write them: 30s, 10m, 1h30m, 7d, 2w."""

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PART = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def seconds_of(text: str) -> float | None:
    """The seconds of `text`; None where it is no duration, or 0."""
    text = text.strip().lower()
    if not _WHOLE.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)) or None

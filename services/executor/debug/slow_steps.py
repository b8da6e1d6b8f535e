"""Which steps are worth a line in the log because they took too long. Pure: time comes in."""

import math
import re

FACTOR = 4.0
"""How many times as long as usual, by default."""
LEAST = 0.25
"""Seconds: nobody misses less, however fast the ring is."""
INTERVAL = 5.0
"""Seconds in which one line pays back."""
BURST = 5
"""Lines that may follow each other at once."""

_SETTING = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>x|s|ms)", re.ASCII)


class SlowSteps:
    """Says of each step whether it was slow, and whether to log it."""

    def __init__(self, factor: float, seconds: float) -> None:
        """Slow is what takes `factor` times as long as expected and `LEAST`; or `seconds` (inf: never)."""
        self._factor = factor
        self._seconds = seconds
        self._lines = float(BURST)
        self._at = -math.inf
        self.suppressed = 0
        """Slow steps that were not logged since the last one that was."""

    @classmethod
    def of(cls, setting: str) -> "SlowSteps":
        """`auto`, `off`, a factor (`3x`) or a time (`0.5s`, `200ms`). Raises ValueError with a phrase that
        says what is wrong."""
        if setting == "off":
            return cls(math.inf, math.inf)
        if setting == "auto":
            return cls(FACTOR, math.inf)
        found = _SETTING.fullmatch(setting)
        number = float(found["number"]) if found else 0.0
        if found is None or number <= 0:
            raise ValueError(f"{setting!r} is not auto, off, a factor such as 4x or a time such as 0.5s")
        if found["unit"] == "x":
            return cls(number, math.inf)
        return cls(math.inf, number / 1000 if found["unit"] == "ms" else number)

    def is_slow(self, seconds: float, expected: float) -> bool:
        """`expected`: what such a step usually takes; 0: not known."""
        if seconds >= self._seconds:
            return True
        return expected > 0 and seconds >= max(LEAST, self._factor * expected)

    def may_log(self, now: float) -> bool:
        """Whether one more line is not too many, at `now` (monotonic seconds); those that are are counted."""
        self._lines = min(BURST, self._lines + max(0.0, now - self._at) / INTERVAL)
        self._at = now
        if self._lines < 1:
            self.suppressed += 1
            return False
        self._lines -= 1
        return True

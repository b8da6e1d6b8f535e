"""Stretches in which every request failed. Pure."""

from services.cli.sla.intervals import Interval

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

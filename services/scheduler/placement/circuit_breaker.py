"""A group's circuit breaker: who has failed is left alone for a while, and is then tried with one request.

             failure, trip                     open time is over
    closed ────────────────▶ open ────────────────────────────▶ half-open ──┐ one probe may go
       ▲                      ▲ ▲        failure of the probe,      │       │ at a time; `cancel_probe`
       │                      │ └─────── twice the open time ───────┘ ◀─────┘ when it was not sent
       └──────────────────────┴────────── success ──────────────────┘

Failures are refusals (short open times: the group lives and is full), time-outs (longer ones) and what the
health monitor says (open until it says otherwise). After M. Nygard, Release It! (2007). No clock.
"""

import math
from typing import Literal

State = Literal["closed", "half_open", "open"]
STATES: tuple[State, ...] = ("closed", "half_open", "open")

FIRST_REFUSAL, LONGEST_REFUSAL = 0.01, 1.0
"""Seconds for which a group is left alone that has refused, doubled with each time in a row."""
TIMEOUT_DOUBLINGS = 3
"""After a time-out the open time doubles so often at most: a group that is back shall not wait long."""


class CircuitBreaker:
    """One group's, as one scheduler sees it. Times are monotonic seconds."""

    __slots__ = ("_pause", "_probing", "_timeout_pause", "open_until", "state")

    def __init__(self, timeout_pause: float = 1.0) -> None:
        """`timeout_pause`: seconds for which the group is left alone after the first time-out."""
        self._timeout_pause = timeout_pause
        self._pause = 0.0
        """The last open time; 0 after a success."""
        self._probing = False
        self.state: State = "closed"
        self.open_until = 0.0
        """While it is open: when it will be half-open; infinite when only the health monitor can say."""

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half_open" and not self._probing)

    def sent(self) -> None:
        """A request goes to the group: in half-open it is the probe."""
        self._probing = self.state == "half_open"

    def cancel_probe(self) -> None:
        """Nothing that was sent is on its way any more: another probe may go."""
        self._probing = False

    def succeeded(self) -> None:
        """The group has taken what it was sent."""
        if self.open_until != math.inf or self.state != "open":
            self._close()

    def refused(self, now: float) -> None:
        """The group has not taken something, and may later."""
        self._fail(now, FIRST_REFUSAL, LONGEST_REFUSAL)

    def timed_out(self, now: float) -> None:
        """The group has not answered."""
        self._fail(now, self._timeout_pause, self._timeout_pause * 2.0**TIMEOUT_DOUBLINGS)

    def trip(self) -> None:
        """The health monitor says that the ring is out of service."""
        self.state, self.open_until, self._probing = "open", math.inf, False

    def restore(self) -> None:
        """It says that the ring is back in service: one probe shows whether that is so."""
        if self.state == "open" and self.open_until == math.inf:
            self.state, self.open_until = "half_open", 0.0

    def tick(self, now: float) -> bool:
        """Becomes half-open when the open time is over; says whether it did."""
        if self.state != "open" or now < self.open_until:
            return False
        self.state, self.open_until = "half_open", 0.0
        return True

    def _fail(self, now: float, first: float, longest: float) -> None:
        """Those that were sent before it opened, and fail after, are the same failure."""
        if self.state == "open":
            return
        self._pause = min(max(first, 2 * self._pause), longest)
        self.state, self.open_until, self._probing = "open", now + self._pause, False

    def _close(self) -> None:
        self._pause, self._probing = 0.0, False
        self.state, self.open_until = "closed", 0.0

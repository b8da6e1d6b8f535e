"""What one gateway may spend of one window at this moment, without asking anybody. Pure.

spend ──enough left──▶ at once                           the way of nearly every request
  └─ not enough ──▶ `apply` to the shared window ──▶ granted | refused, for as long as `shut` says
                      brings along what is to be given back and what was overspent
"""

import math

from services.gateway.limits import window as windows
from services.gateway.limits.window import LEASE, Take
from shared.messages.records import Spent

REFUSAL_HOLDS = 0.25
"""Seconds at most that a refusal is repeated without asking again: others may have given something back."""


class Account:
    """One per limit and gateway. Times are unix seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.window = Spent()
        """As it was seen last."""
        self._left = 0
        self._granted_in = 0
        self._until = 0.0
        self._shut_until = 0.0
        self._spent_lately = 0.0
        self._measured_at = 0.0
        self._returns: dict[int, int] = {}
        """What is to be given back, by the second in which it was granted."""
        self._overspent = 0
        self.waiting = 0
        """What others who wait for the next answer will need."""
        self.used_at = 0.0

    def spend(self, amount: int, now: float) -> int | None:
        """The second in which it was granted; None where there is not enough."""
        self.used_at = now
        if now >= self._until or self._left < amount:
            return None
        self._left -= amount
        self._measure(amount, now)
        return self._granted_in

    def shut(self, amount: int, now: float) -> float:
        """Seconds that it is known to be refused for; 0: it is not known."""
        if now >= self._shut_until or self._returns:
            return 0.0
        return windows.take(self.window, now, needed=amount, wanted=0, limit=self.limit).wait

    def settle(self, second: int, reserved: int, spent: int) -> None:
        """Of what was `reserved`, `spent` was."""
        if spent > reserved:
            self._overspent += spent - reserved
        elif spent < reserved:
            self._returns[second] = self._returns.get(second, 0) + reserved - spent

    def owes(self, now: float) -> bool:
        """Whether there is something that the others should know."""
        return bool(self._returns or self._overspent or (self._left and now >= self._until))

    def apply(self, window: Spent, now: float, amount: int) -> Take:
        """What the shared window becomes when this gateway gives back what it need not, and takes `amount`.

        Nothing is changed here before `applied`: somebody else may be first, then it is done with a newer window.
        """
        window = windows.advanced(window, now)
        for second, unspent in self._all_returns():
            window = windows.give_back(window, second, unspent)
        if self._overspent:
            window = windows.charge(window, now, self._overspent)
        if not amount:
            return Take(window, 0, 0.0)
        wanted = max(amount, self.waiting, math.ceil(self._rate(now) * LEASE))
        return windows.take(window, now, needed=amount, wanted=wanted, limit=self.limit)

    def applied(self, taken: Take, now: float) -> None:
        """`taken` is what the shared window is now."""
        self.window = taken.window
        self._returns.clear()
        self._overspent = 0
        self._left, self._granted_in, self._until = taken.granted, taken.window.newest, now + LEASE
        self._shut_until = now + min(taken.wait, REFUSAL_HOLDS)

    def remaining(self, now: float) -> int:
        """What could be granted, as far as this gateway knows."""
        left = self._left if now < self._until else 0
        return max(0, self.limit - windows.used(self.window, now) + left)

    def _all_returns(self) -> list[tuple[int, int]]:
        """A new share takes the place of the old one, whose rest goes back."""
        returns = list(self._returns.items())
        if self._left:
            returns.append((self._granted_in, self._left))
        return returns

    def _measure(self, amount: int, now: float) -> None:
        self._spent_lately = self._rate(now) + amount
        self._measured_at = now

    def _rate(self, now: float) -> float:
        """About what was spent within the last second."""
        return self._spent_lately * math.exp(-max(0.0, now - self._measured_at))

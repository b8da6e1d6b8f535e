"""What has been granted within the last minute, by all gateways together. Pure: values in, values out.

    second    … 07 08 09 10 11 12 …
    granted      4  0  9  0  2  1        a gateway takes a share, and spends it within LEASE seconds
              └──── KEPT seconds ────┘   what was granted counts until no minute has both its spending and now

    granted in second s ─▶ spent before s + 1 + LEASE ─▶ of no concern from s + 1 + LEASE + 60 on

Invariant: what is spent within any 60 s is at most the limit, however many gateways spend it, as long as their
clocks agree; each second that two clocks differ by lets a sixtieth of the limit more through.

An `LimitAccount` is what one gateway may spend at this moment without asking anybody:

    spend ──enough left──▶ at once                           the way of nearly every request
      └─ not enough ──▶ `apply` to the shared window ──▶ granted | refused, for as long as `shut` says
                          brings along what is to be given back and what was overspent
"""

import math
from typing import NamedTuple

from shared.messages.records import Spent

MINUTE = 60
LEASE = 1  # seconds for which a gateway may spend what it was granted
KEPT = MINUTE + LEASE + 1  # seconds after which what was granted counts no longer
# A gateway that takes ahead of need takes at most this part of what is free: the others shall not find it all gone.
SHARE = 4


class Take(NamedTuple):
    """What comes of asking."""

    window: Spent
    granted: int  # 0, or at least what was needed
    wait: float  # seconds after which there will be enough, if nobody takes it before; 0 where it was granted


def advanced(window: Spent, now: float) -> Spent:
    """`window` at `now` (unix seconds), without what counts no longer. Does not go back in time, but for the
    mark of a clock that was wrong by more than a minute: that would else keep the window full for as long."""
    if window.newest > now + KEPT:
        window = Spent(int(now), window.slots)
    second = max(int(now), window.newest)
    passed = second - window.newest
    if not passed:
        return window
    slots = [*window.slots, *([0] * min(passed, KEPT))][-KEPT:]
    while slots and not slots[0]:
        del slots[0]
    return Spent(second, slots)


def used(window: Spent, now: float) -> int:
    return sum(advanced(window, now).slots)


def take(window: Spent, now: float, *, needed: int, wanted: int, limit: int) -> Take:
    """Grants `needed` at least, up to `wanted` where there is plenty; or nothing."""
    window = advanced(window, now)
    free = limit - sum(window.slots)
    if free < needed:
        return Take(window, 0, _wait(window, now, needed - free))
    granted = max(needed, min(wanted, free // SHARE))
    return Take(_add(window, granted), granted, 0.0)


def give_back(window: Spent, second: int, amount: int) -> Spent:
    """Takes back what was granted in `second` and not spent; where that counts no longer there is nothing to do."""
    index = len(window.slots) - 1 - (window.newest - second)
    if not 0 <= index < len(window.slots):
        return window
    slots = list(window.slots)
    slots[index] = max(0, slots[index] - amount)
    return Spent(window.newest, slots)


def clear_in(window: Spent, now: float) -> float:
    """Seconds until nothing counts any more."""
    window = advanced(window, now)
    return _wait(window, now, sum(window.slots))


def _add(window: Spent, amount: int) -> Spent:
    slots = list(window.slots) or [0]
    slots[-1] += amount
    return Spent(window.newest, slots)


def _wait(window: Spent, now: float, missing: int) -> float:
    """Seconds until `missing` of what is counted now will count no longer; infinite where that is less."""
    oldest = window.newest - len(window.slots) + 1
    for offset, amount in enumerate(window.slots):
        if missing <= 0:
            return max(0.0, oldest + offset - 1 + KEPT - now)
        missing -= amount
    return max(0.0, window.newest + KEPT - now) if missing <= 0 else math.inf


# Seconds at most that a refusal is repeated without asking again: others may have given something back.
REFUSAL_HOLDS = 0.25


class LimitAccount:
    """One per limit and gateway. Times are unix seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.window = Spent()  # as it was seen last
        self._left = 0
        self._granted_in = 0
        self._until = 0.0
        self._shut_until = 0.0
        self._spent_lately = 0.0
        self._measured_at = 0.0
        self._returns: dict[int, int] = {}  # what is to be given back, by the second in which it was granted
        self._overspent = 0
        self.waiting = 0  # what others who wait for the next answer will need
        self.used_at = 0.0

    def spend(self, amount: int, now: float) -> int | None:
        """The second in which it was granted; None where there is not enough."""
        self.used_at = now
        if now >= self._until or self._left < amount:
            return None
        self._left -= amount
        self._spent_lately, self._measured_at = self._rate(now) + amount, now
        return self._granted_in

    def shut(self, amount: int, now: float) -> float:
        """Seconds that it is known to be refused for; 0: it is not known."""
        if now >= self._shut_until or self._returns:
            return 0.0
        return take(self.window, now, needed=amount, wanted=0, limit=self.limit).wait

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
        window = advanced(window, now)
        # A new share takes the place of the old one, whose rest goes back.
        for second, unspent in (*self._returns.items(), (self._granted_in, self._left)):
            window = give_back(window, second, unspent)
        if self._overspent:  # beyond what had been granted: the window may be over its limit then
            window = _add(window, self._overspent)
        if not amount:
            return Take(window, 0, 0.0)
        wanted = max(amount, self.waiting, math.ceil(self._rate(now) * LEASE))
        return take(window, now, needed=amount, wanted=wanted, limit=self.limit)

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
        return max(0, self.limit - used(self.window, now) + left)

    def _rate(self, now: float) -> float:
        """About what was spent within the last second."""
        return self._spent_lately * math.exp(-max(0.0, now - self._measured_at))

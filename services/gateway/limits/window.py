"""What has been granted within the last minute, by all gateways together. Pure: values in, values out.

    second    … 07 08 09 10 11 12 …
    granted      4  0  9  0  2  1        a gateway takes a share, and spends it within LEASE seconds
              └──── KEPT seconds ────┘   what was granted counts until no minute has both its spending and now

    granted in second s ─▶ spent before s + 1 + LEASE ─▶ of no concern from s + 1 + LEASE + 60 on

Invariant: what is spent within any 60 s is at most the limit, however many gateways spend it, as long as their
clocks agree; each second that two clocks differ by lets a sixtieth of the limit more through.
"""

import math
from typing import NamedTuple

from shared.messages.records import Spent

MINUTE = 60
LEASE = 1
"""Seconds for which a gateway may spend what it was granted."""
KEPT = MINUTE + LEASE + 1
"""Seconds after which what was granted counts no longer."""
SHARE = 4
"""A gateway that takes ahead of need takes at most this part of what is free: the others shall not find it all gone."""


class Take(NamedTuple):
    """What comes of asking."""

    window: Spent
    granted: int
    """0, or at least what was needed."""
    wait: float
    """Seconds after which there will be enough, if nobody takes it before; 0 where it was granted."""


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


def charge(window: Spent, now: float, amount: int) -> Spent:
    """Counts what was spent beyond what had been granted: the window may be over its limit then."""
    return _add(advanced(window, now), amount)


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

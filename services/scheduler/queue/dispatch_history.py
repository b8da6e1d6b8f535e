"""What must be remembered of generations that do not wait here: which are cancelled before they are
pulled, and which ring has taken which attempt."""

import math
from collections import OrderedDict
from typing import NamedTuple

REMEMBER = 120.0
"""Seconds for which a cancelled generation is known."""


class Holder(NamedTuple):
    """The ring that has accepted an attempt of a generation."""

    attempt: int
    group: str
    epoch: int


class _Cancelled(NamedTuple):
    until: float
    """Monotonic seconds for which it is remembered."""
    claim: float
    """Of the gateway that said so; infinite: whoever owns the generation."""


class DispatchHistory:
    """Cancelled generations, and the rings that took the recent ones. Bounded in number."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._cancelled: OrderedDict[str, _Cancelled] = OrderedDict()
        self._taken: OrderedDict[str, Holder] = OrderedDict()

    def cancel(self, generation_id: str, now: float, claim: int = -1) -> None:
        """Remembers a cancellation until `now + REMEMBER` (monotonic seconds). `claim`: of the gateway that has
        said so; -1: it holds whoever owns the generation."""
        known = self._cancelled.get(generation_id)
        reach = math.inf if claim < 0 else max(claim, known.claim if known else 0.0)
        self._cancelled[generation_id] = _Cancelled(now + REMEMBER, reach)
        self._cancelled.move_to_end(generation_id)
        while self._cancelled:
            oldest, entry = next(iter(self._cancelled.items()))
            if entry.until > now and len(self._cancelled) <= self._capacity:
                break
            del self._cancelled[oldest]

    def cancelled(self, generation_id: str, claim: int = 0) -> bool:
        """Whether a request that was handed in under `claim` is cancelled."""
        entry = self._cancelled.get(generation_id)
        return entry is not None and claim <= entry.claim

    def claim_of_cancel(self, generation_id: str) -> int:
        """The claim under which it was cancelled; -1: whoever owns it."""
        entry = self._cancelled.get(generation_id)
        return -1 if entry is None or entry.claim == math.inf else int(entry.claim)

    def taken(self, generation_id: str, holder: Holder) -> None:
        """Remembers which ring has accepted a generation."""
        self._taken[generation_id] = holder
        self._taken.move_to_end(generation_id)
        if len(self._taken) > self._capacity:
            self._taken.popitem(last=False)

    def holder(self, generation_id: str) -> Holder | None:
        """The ring that accepted the generation last."""
        return self._taken.get(generation_id)

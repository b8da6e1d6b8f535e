"""What must be remembered of generations that do not wait here: which are cancelled before they are
pulled, and which ring has taken which attempt."""

from collections import OrderedDict
from typing import NamedTuple

REMEMBER = 120.0
"""Seconds for which a cancelled generation is known."""


class Holder(NamedTuple):
    """The ring that has accepted an attempt of a generation."""

    attempt: int
    group: str
    epoch: int


class GenerationMemory:
    """Cancelled generations, and the rings that took the recent ones. Bounded in number."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self._taken: OrderedDict[str, Holder] = OrderedDict()

    def cancel(self, generation_id: str, now: float) -> None:
        """Remembers a cancellation until `now + REMEMBER` (monotonic seconds)."""
        self._cancelled[generation_id] = now + REMEMBER
        self._cancelled.move_to_end(generation_id)
        while self._cancelled:
            oldest, until = next(iter(self._cancelled.items()))
            if until > now and len(self._cancelled) <= self._capacity:
                break
            del self._cancelled[oldest]

    def cancelled(self, generation_id: str) -> bool:
        return generation_id in self._cancelled

    def taken(self, generation_id: str, holder: Holder) -> None:
        """Remembers which ring has accepted a generation."""
        self._taken[generation_id] = holder
        self._taken.move_to_end(generation_id)
        if len(self._taken) > self._capacity:
            self._taken.popitem(last=False)

    def holder(self, generation_id: str) -> Holder | None:
        """The ring that accepted the generation last."""
        return self._taken.get(generation_id)

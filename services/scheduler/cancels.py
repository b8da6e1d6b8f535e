"""What must be remembered to cancel a generation wherever it is: not pulled yet, waiting, or sent."""

from collections import OrderedDict

REMEMBER = 120.0
"""Seconds for which a cancelled generation is known."""


class CancelMemory:
    """Cancelled generations, and the groups that took the recent ones. Bounded in number."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self._taken: OrderedDict[str, str] = OrderedDict()

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

    def taken(self, generation_id: str, group: str) -> None:
        """Remembers which group has accepted a generation."""
        self._taken[generation_id] = group
        self._taken.move_to_end(generation_id)
        if len(self._taken) > self._capacity:
            self._taken.popitem(last=False)

    def group_of(self, generation_id: str) -> str | None:
        return self._taken.get(generation_id)

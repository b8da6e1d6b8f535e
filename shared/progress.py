"""Hung or busy: told apart by progress, never by how long something takes.

A rank that has work in flight and whose counters move is busy, however slow it is; one whose
counters stand still for `limit` seconds is hung, however healthy it looks from outside.
"""

from collections.abc import Hashable

Counters = tuple[int, ...]


class ProgressWatch:
    """Remembers, per key, when its counters last moved. Pure: time comes in as an argument."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seen: dict[Hashable, tuple[Counters, float]] = {}

    def stands_still(self, key: Hashable, counters: Counters, in_flight: bool, now: float) -> bool:
        """Notes `counters` at `now` (seconds); True when `key` has been stuck for the limit or longer."""
        previous = self._seen.get(key)
        if previous is None or previous[0] != counters or not in_flight:
            self._seen[key] = (counters, now)
            return False
        return now - previous[1] >= self._limit

    def forget(self, key: Hashable) -> None:
        self._seen.pop(key, None)

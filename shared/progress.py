"""Hung or busy: told apart by progress, never by how long something takes.

A rank that has work in flight and whose counters move is busy, however slow it is; one whose
counters stand still for `limit` seconds is hung, however healthy it looks from outside.
"""

from collections.abc import Hashable
from dataclasses import dataclass

Counters = tuple[int, ...]

_KEEP = 2.0
"""A key that has not been observed for this many times the limit is dropped when another one comes."""


@dataclass(slots=True)
class _Seen:
    state: tuple[Counters, bool]
    """The counters, and whether they must move."""
    since: float
    """When they were first seen like this."""
    observed: float


class ProgressWatch:
    """Remembers, per key, since when its counters stand still. Pure: time comes in as an argument.

    Only what was observed counts: a key stands still from the first observation to the last one that
    show the same counters with work in flight. Silence proves nothing.
    """

    def __init__(self, limit: float) -> None:
        """`limit`: seconds."""
        self._limit = limit
        self._seen: dict[Hashable, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def stands_still(self, key: Hashable, counters: Counters, in_flight: bool, now: float) -> bool:
        """Notes `counters` at `now` (seconds); True when `key` has been stuck for the limit or longer."""
        state = (counters, in_flight)
        seen = self._seen.get(key)
        if seen is None:
            self._drop_unobserved(now)
        if seen is None or seen.state != state or not in_flight:
            self._seen[key] = _Seen(state, now, now)
            return False
        seen.observed = now
        return now - seen.since >= self._limit

    def forget(self, key: Hashable) -> None:
        self._seen.pop(key, None)

    def _drop_unobserved(self, now: float) -> None:
        before = now - _KEEP * self._limit
        for key in [key for key, seen in self._seen.items() if seen.observed < before]:
            del self._seen[key]

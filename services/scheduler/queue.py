"""Requests that wait for a group: by model and lane, most urgent lane first, first come first served.

    model ─┬─ recovery     ▶▶▶ ─┐
           ├─ interactive  ▶▶▶▶▶├─▶ peek, take
           └─ batch        ▶▶▶▶ ┘

Invariant: a generation waits at most once, with its newest attempt.
"""

import heapq
from collections import Counter
from collections.abc import Callable

from services.scheduler.waiting import WaitingRequest
from shared.messages import LANES, Lane


class _Heap:
    """A heap of requests by key. Requests that left the queue otherwise are skipped and swept."""

    def __init__(self, alive: Callable[[WaitingRequest], bool]) -> None:
        self._alive = alive
        self._entries: list[tuple[float, int, WaitingRequest]] = []
        self._pushed = 0
        self._sweep_at = 64

    def push(self, key: float, item: WaitingRequest) -> None:
        self._pushed += 1
        heapq.heappush(self._entries, (key, self._pushed, item))
        if len(self._entries) > self._sweep_at:
            self._entries = [entry for entry in self._entries if self._alive(entry[2])]
            heapq.heapify(self._entries)
            self._sweep_at = 64 + 2 * len(self._entries)

    def first(self) -> tuple[float, WaitingRequest] | None:
        while self._entries:
            key, _, item = self._entries[0]
            if self._alive(item):
                return key, item
            heapq.heappop(self._entries)
        return None


class RequestQueue:
    """Waiting requests. Knows no clock: `expire` is told the time."""

    def __init__(self) -> None:
        self._by_id: dict[str, WaitingRequest] = {}
        self._lanes: dict[str, dict[Lane, _Heap]] = {}
        self._deadlines = _Heap(self._waits)
        self._depth: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._depth_of: Counter[tuple[str, Lane]] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def depth(self, lane: Lane) -> int:
        return self._depth[lane]

    def depth_of(self, model: str, lane: Lane) -> int:
        """Requests of one lane that wait for `model`."""
        return self._depth_of[model, lane]

    def models(self) -> list[str]:
        """Models that requests wait for."""
        return list(self._lanes)

    def push(self, item: WaitingRequest) -> WaitingRequest | None:
        """Lets `item` wait. Returns the request that has no place any more: an older attempt of the
        same generation, `item` itself where it is the older or the same one, or None."""
        other = self._by_id.get(item.generation_id)
        if other is not None:
            if item.attempt <= other.attempt:
                return item
            self._drop(other)
        self._by_id[item.generation_id] = item
        self._depth[item.lane] += 1
        self._depth_of[item.model, item.lane] += 1
        lanes = self._lanes.setdefault(item.model, {})
        lanes.setdefault(item.lane, _Heap(self._waits)).push(item.order, item)
        if item.deadline:
            self._deadlines.push(item.deadline, item)
        return other

    def peek(self, model: str) -> WaitingRequest | None:
        """The request for `model` whose turn it is."""
        lanes = self._lanes.get(model, {})
        for lane in LANES:
            found = lanes[lane].first() if lane in lanes else None
            if found is not None:
                return found[1]
        self._lanes.pop(model, None)
        return None

    def take(self, item: WaitingRequest) -> None:
        """Takes out a waiting request."""
        assert self._waits(item), "only a waiting request can be taken"
        self._drop(item)

    def remove(self, generation_id: str) -> WaitingRequest | None:
        """Takes out the request of a generation; None when it does not wait here."""
        item = self._by_id.get(generation_id)
        if item is not None:
            self._drop(item)
        return item

    def expire(self, now: float) -> list[WaitingRequest]:
        """Takes out the requests whose deadline is not after `now` (unix seconds), earliest first."""
        expired = []
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            self._drop(first[1])
            expired.append(first[1])
        return expired

    def _waits(self, item: WaitingRequest) -> bool:
        return self._by_id.get(item.generation_id) is item

    def _drop(self, item: WaitingRequest) -> None:
        del self._by_id[item.generation_id]
        self._depth[item.lane] -= 1
        key = item.model, item.lane
        self._depth_of[key] -= 1
        if not self._depth_of[key]:
            del self._depth_of[key]

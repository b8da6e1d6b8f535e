"""Requests that wait for a group: by model and lane, most urgent lane first, fair among tenants within a lane.

    model ─┬─ recovery     ▶▶▶ ─┐
           ├─ interactive  ▶▶▶▶▶├─▶ peek, take
           └─ batch        ▶▶▶▶ ┘

Invariant: a generation waits at most once, with its newest attempt.
"""

from collections import Counter
from collections.abc import Mapping

from services.scheduler.fair import FairQueue, RequestHeap
from services.scheduler.waiting import WaitingRequest
from shared.messages import LANES, Lane


class RequestQueue:
    """Waiting requests. Knows no clock: `expire` is told the time."""

    def __init__(self) -> None:
        self._by_id: dict[str, WaitingRequest] = {}
        self._lanes: dict[str, dict[Lane, FairQueue]] = {}
        self._deadlines = RequestHeap(self._waits)
        self._depth: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._depth_of: Counter[tuple[str, Lane]] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def depth(self, lane: Lane) -> int:
        return self._depth[lane]

    def depth_of(self, model: str, lane: Lane) -> int:
        """Requests of one lane that wait for `model`."""
        return self._depth_of[model, lane]

    @property
    def depths(self) -> Mapping[tuple[str, Lane], int]:
        """Requests by model and lane, of those that have any. Not to be changed."""
        return self._depth_of

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
        if item.lane not in lanes:
            lanes[item.lane] = FairQueue(self._waits)
        lanes[item.lane].push(item)
        if item.deadline:
            self._deadlines.push((0, item.deadline), item.order, item)
        return other

    def peek(self, model: str) -> WaitingRequest | None:
        """The request for `model` whose turn it is."""
        lanes = self._lanes.get(model, {})
        for lane in LANES:
            if self._depth_of.get((model, lane)) and (item := lanes[lane].peek()) is not None:
                return item
        self._lanes.pop(model, None)
        return None

    def take(self, item: WaitingRequest) -> None:
        """Takes out the request that `peek` gave, and charges its tenant."""
        assert self._waits(item), "only a waiting request can be taken"
        self._lanes[item.model][item.lane].charge(item)
        self._drop(item)

    def get(self, generation_id: str) -> WaitingRequest | None:
        """The request of a generation; None when it does not wait here."""
        return self._by_id.get(generation_id)

    def remove(self, generation_id: str) -> WaitingRequest | None:
        """Takes out the request of a generation; None when it does not wait here."""
        item = self._by_id.get(generation_id)
        if item is not None:
            self._drop(item)
        return item

    def expire(self, now: float) -> list[WaitingRequest]:
        """Takes out the requests whose deadline is not after `now` (unix seconds), earliest first."""
        expired = []
        while (first := self._deadlines.first()) is not None and first.deadline <= now:
            self._drop(first)
            expired.append(first)
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

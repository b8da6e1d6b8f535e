"""Gathers requests by destination into dispatch batches of 1-128.

Waiting buys throughput only while a group is busy and more is on its way; otherwise a request goes at once.
"""

from dataclasses import dataclass, field

from services.scheduler.waiting import WaitingRequest

MAX_BATCH = 128


@dataclass(slots=True)
class _Gathering:
    since: float
    items: list[WaitingRequest] = field(default_factory=list)


class Batcher:
    """Requests gathered per group. Times are monotonic seconds."""

    def __init__(self, max_wait: float, max_bytes: int) -> None:
        self._max_wait = max_wait
        self._max_bytes = max_bytes
        self._gathered: dict[str, _Gathering] = {}

    def add(self, group: str, item: WaitingRequest, now: float) -> None:
        self._gathered.setdefault(group, _Gathering(now)).items.append(item)

    def groups(self) -> list[str]:
        """Groups that something is gathered for."""
        return list(self._gathered)

    def take(self, group: str, now: float, *, hurry: bool) -> list[WaitingRequest]:
        """The next batch for `group`; empty while it is worth waiting.

        It goes when it is full, when its first request has waited long enough, or on `hurry` (the
        group is idle, or nothing else is coming). A batch exceeds `max_bytes` only with a single request.
        """
        gathering = self._gathered.get(group)
        if gathering is None:
            return []
        count = self._fitting(gathering.items)
        full = count == MAX_BATCH or count < len(gathering.items)
        if not (hurry or full or now >= gathering.since + self._max_wait):
            return []
        batch, rest = gathering.items[:count], gathering.items[count:]
        if rest:
            # They have waited as long as the batch that goes: their time is not counted anew.
            gathering.items = rest
        else:
            del self._gathered[group]
        return batch

    def take_back(self, group: str) -> list[WaitingRequest]:
        """Everything gathered for a group that shall not have it any more."""
        gathering = self._gathered.pop(group, None)
        return gathering.items if gathering is not None else []

    def due(self) -> float | None:
        """When the oldest gathered request has waited long enough."""
        oldest = min((gathering.since for gathering in self._gathered.values()), default=None)
        return None if oldest is None else oldest + self._max_wait

    def _fitting(self, items: list[WaitingRequest]) -> int:
        size = 0
        for count, item in enumerate(items[:MAX_BATCH]):
            size += len(item.raw)
            if size > self._max_bytes and count:
                return count
        return min(len(items), MAX_BATCH)

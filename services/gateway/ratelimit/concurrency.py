"""Generations at the same time, per key and tenant: exact at this gateway, a moment old at the others. Pure.

Each gateway tells its counts when they change and every second; whoever is silent for SILENT seconds has none.
Two gateways that admit within the time that news take (a few milliseconds, TELL at most) may together admit more.
"""

from collections import Counter

from shared.messages.records import InUse

TELL = 0.1  # seconds between two messages about changes
REPEAT = 1.0
SILENT = 3.0


class ConcurrencyCounts:
    """Times are seconds of a monotonic clock."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._here: Counter[str] = Counter()
        self._elsewhere: dict[str, tuple[float, dict[str, int]]] = {}
        self._changed = False
        self._told_at = float("-inf")

    def begin(self, names: dict[str, int], now: float) -> tuple[str, int] | None:
        """One more for each of `names`; or, where one of them has as many as it may (the value), which and how many."""
        for name, limit in names.items():
            if (count := self.count(name, now)) >= limit:
                return name, count
        self._here.update(names.keys())
        self._changed = True
        return None

    def end(self, names: dict[str, int]) -> None:
        """Undoes `begin`."""
        for name in names:
            self._here[name] -= 1
            if self._here[name] <= 0:
                del self._here[name]
        self._changed = True

    def count(self, name: str, now: float) -> int:
        """As far as this gateway knows."""
        heard = (counts for at, counts in self._elsewhere.values() if now - at < SILENT)
        return self._here[name] + sum(counts.get(name, 0) for counts in heard)

    def hear(self, news: InUse, now: float) -> None:
        """What another gateway has said of itself."""
        if news.gateway == self._gateway:
            return
        for silent in [name for name, (at, _) in self._elsewhere.items() if now - at >= SILENT]:
            del self._elsewhere[silent]
        if news.counts:
            self._elsewhere[news.gateway] = now, news.counts
        else:
            self._elsewhere.pop(news.gateway, None)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to tell, now or later, before another `begin`."""
        return not self._changed and not self._here

    def news(self, now: float) -> InUse | None:
        """What is to be told now; None: nothing."""
        if not self._changed and not (self._here and now - self._told_at >= REPEAT):
            return None
        self._changed, self._told_at = False, now
        return InUse(self._gateway, dict(self._here))

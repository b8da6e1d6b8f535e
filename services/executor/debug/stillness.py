"""For how long counters have not moved. Pure: time comes in."""

from collections.abc import Hashable, Mapping


class Stillness:
    """Looks at values from time to time, and remembers when each was last seen to change."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def look(self, values: Mapping[Hashable, object], now: float) -> None:
        """All values at `now` (seconds); those that are not there any more are forgotten."""
        self._seen = {
            key: seen if (seen := self._seen.get(key)) is not None and seen[0] == value else (value, now)
            for key, value in values.items()
        }

    def seconds(self, key: Hashable, now: float) -> float:
        """Since the value was last seen to change; 0 for one that was never looked at."""
        seen = self._seen.get(key)
        return round(now - seen[1], 2) if seen else 0.0

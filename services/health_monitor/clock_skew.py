"""Whose clock differs from this monitor's, as heartbeats tell. Pure: times come in as arguments.

    sent_at, by the sender's clock ── on its way, perhaps delayed ──▶ now, by ours

A delay makes a clock look slower than it is and never faster: of the last WINDOW heartbeats the one that was delayed
least counts, so one that waited in a cut link says nothing of a clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import structlog

WINDOW = 8
"""Heartbeats of an instance that are compared."""
LARGE = 2.0
"""Seconds by which a clock may differ before that is told: deadlines, limits per minute and reports of service levels
compare clocks; nothing else does."""

log = structlog.get_logger(__name__)


class Clocks:
    """Seconds by which instances' clocks are ahead of ours."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def observe(self, instance: str, sent_at: float, now: float) -> None:
        """A heartbeat has come. `sent_at` (unix seconds) is 0 where its sender is of an older version."""
        if not sent_at:
            return
        seen = self._seen.setdefault(instance, deque(maxlen=WINDOW))
        seen.append(sent_at - now)
        if len(seen) == WINDOW:
            self._tell(instance, max(seen))

    def keep(self, instances: Iterable[str]) -> None:
        """Forgets all others."""
        for gone in self._seen.keys() - set(instances):
            del self._seen[gone]
            self._told.discard(gone)

    def ahead(self) -> Iterator[tuple[str, float]]:
        """(instance, seconds), those behind with less than 0; none of whom too little was heard."""
        return ((name, max(seen)) for name, seen in self._seen.items() if len(seen) == WINDOW)

    def _tell(self, instance: str, ahead: float) -> None:
        """Once when it begins, and once when it is over."""
        if abs(ahead) > LARGE and instance not in self._told:
            self._told.add(instance)
            log.warning("clock_differs", instance=instance, seconds_ahead=round(ahead, 3))
        elif abs(ahead) <= LARGE / 2 and instance in self._told:
            self._told.remove(instance)
            log.info("clock_agrees", instance=instance, seconds_ahead=round(ahead, 3))

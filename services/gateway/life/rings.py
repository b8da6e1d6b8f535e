"""What is asked about the rings, of whoever follows their groups' records."""

import time
from typing import Protocol

from services.gateway.life.generation import Generation

IDLE_MARGIN = 10.0
"""Seconds by which a record must be later than an entry to know of it: its load may be of an older
heartbeat, and its time is of the monitor's clock."""


class Rings(Protocol):
    """What the groups' records say."""

    def has_ready_group(self, model: str) -> bool:
        """Whether some group could take a request for `model` now."""
        ...

    def has_waiting(self, group: str, epoch: int) -> bool:
        """Whether requests wait for a place in that ring."""
        ...

    def idle_at(self, group: str, epoch: int) -> float:
        """Unix seconds at which that ring was serving and had no work; 0 when it was not seen so last."""
        ...


def idle(rings: Rings | None, generation: Generation, now: float) -> bool:
    """Whether the generation's ring has been without work since it was last heard. `now`: monotonic seconds."""
    if not generation.group or rings is None:
        return False
    heard_at = time.time() - (now - generation.heard_at)
    return rings.idle_at(generation.group, generation.epoch) > heard_at + IDLE_MARGIN

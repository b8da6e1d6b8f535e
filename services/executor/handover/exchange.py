"""Both directions of a ring's hand-over, as the batcher sees them: what the next plan must carry. No clock, no I/O."""

from collections import deque

from msgspec import structs

from services.executor.engine.plan import StepPlan, to_bytes
from services.executor.handover.arrivals import Arrivals
from services.executor.handover.departures import Departures
from services.executor.kv_cache.allocator import BlockAllocator

MOST_BLOCKS = 256
"""Of one batch."""


class Exchange:
    """What a ring gives to others (`departures`) and takes from them (`arrivals`)."""

    def __init__(self, allocator: BlockAllocator, root: bytes, copies_per_step: int) -> None:
        # A quarter of what a step may restore: the peer's own sequences go on meanwhile.
        self.arrivals = Arrivals(allocator, root, MOST_BLOCKS, max(1, copies_per_step // 4))
        self.departures = Departures(allocator, root)
        self._commands: deque[bytes] = deque()

    def command(self, command: bytes) -> None:
        """One of the next plans carries it to every rank; commands keep their order."""
        self._commands.append(command)

    @property
    def ready(self) -> bool:
        """Whether a plan should be sent, be there something to compute or not."""
        return bool(self._commands) or self.arrivals.ready

    @property
    def quiet(self) -> bool:
        """Whether neither the plan under way nor the next one has to do with it."""
        return not (self._commands or self.arrivals.adopting)

    def extend(self, plan: StepPlan) -> StepPlan:
        """`plan`, which is about to be sent, with what it must carry."""
        if not self.ready:
            return plan
        pairs = self.arrivals.take()
        command = self._commands.popleft() if self._commands else b""
        return structs.replace(plan, adoptions=to_bytes(pairs), handover=command)

    def make_way(self) -> bool:
        """Gives up what is being received, for sequences that need the room; whether there was anything. What is
        being sent ranks still read: it is asked for, and comes back soon."""
        self.departures.crowded = bool(self.departures.held)
        if not self.arrivals.reserved:
            return False
        self.arrivals.end()
        return True

    @property
    def held(self) -> list[list[int]]:
        """Blocks in use for the exchange, as tables. For checks."""
        return [self.departures.held, self.arrivals.reserved]

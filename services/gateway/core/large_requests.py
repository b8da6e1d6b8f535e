"""Large requests, one after another: a body of megabytes takes the event loop tens of milliseconds to decode and check,
and many at once would have everybody else's requests wait for seconds.

    tenant a   [4 MB][4 MB]        event loop   [a][ others ][b][ others ][a][ others ]
    tenant b   [1 MB]                            t     >= t

Each tenant has its turn, and between two large requests the loop belongs to the others for as long as the last one has
kept it. So large requests take half of a gateway's time at most, whoever sends them, and a small one waits for one of
them, not for all.
"""

import asyncio

from services.gateway.core.tenant_pool import Bound, TenantPool
from shared.limits import LARGE_WAITING
from shared.tasks import RoundRobin

LARGE_REQUEST = 64 << 10  # bytes from which a request has to wait for its turn: about a millisecond's work


class LargeRequests:
    """Of one gateway, over all its ports."""

    def __init__(self, waiting_bytes: int = LARGE_WAITING.value) -> None:
        self._waiting = TenantPool(Bound(LARGE_WAITING, waiting_bytes), "large requests")
        self._turns: RoundRobin[asyncio.Future[None]] = RoundRobin()
        self._busy = False

    async def turn(self, tenant: str, size: int) -> None:
        """Returns when a request of `size` bytes may be decoded, at once. Raises `QueueFull`."""
        if size <= LARGE_REQUEST:
            return
        loop = asyncio.get_running_loop()
        self._waiting.take(tenant, size)
        try:
            mine = loop.create_future()
            self._turns.add(tenant, mine)
            if not self._busy:
                self._next(loop)
            await mine
        finally:
            self._waiting.give_back(tenant, size)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while (turn := self._turns.next()) is not None:
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                loop.call_soon(self._decoded, loop, loop.time())  # behind the task that has waited for it
                self._busy = True
                return
        self._busy = False

    def _decoded(self, loop: asyncio.AbstractEventLoop, begun: float) -> None:
        loop.call_later(loop.time() - begun, self._next, loop)

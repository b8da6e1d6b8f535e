"""Requests of which no ring has said anything, when one that may have had them is lost.

A leader names itself to the gateway before it tells the scheduler that it has taken a request, so this is
rare: the entry itself was lost. A request that is still in the queue was in no ring; one that has left it,
and of which the journal knows nothing either, was in the one that was lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog
from nats.js.errors import NotFoundError

from services.gateway.life.generation import Generation
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of

log = structlog.get_logger(__name__)

SUSPICION = 1.0
"""Seconds after a loss before the queue is asked: acknowledgements may be on their way."""
AT_ONCE = 32
"""Questions to the broker at a time."""


class Suspects:
    """Looks at each suspect once, when the journal has been read; again only where the broker did not answer."""

    def __init__(
        self, bus: Bus, replayed: Callable[[], Awaitable[None]], recover: Callable[[Generation], None]
    ) -> None:
        """`replayed` returns when the journal has been read from now on; `recover` hands in again."""
        self._bus = bus
        self._replayed = replayed
        self._recover = recover
        self._wanted = asyncio.Event()
        self._suspects: dict[str, Generation] = {}
        self._stopping = False

    def add(self, generations: Iterable[Generation]) -> None:
        """These may have been in a ring that was lost just now."""
        self._suspects |= {generation.id: generation for generation in generations}
        if self._suspects:
            self._wanted.set()

    def stop(self) -> None:
        """Lets `run` end even where nats-py swallows its cancellation."""
        self._stopping = True

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while not self._stopping:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.sleep(SUSPICION)
            suspects, self._suspects = self._suspects, {}
            await self._replayed()
            await self.check(suspects.values())

    async def check(self, generations: Iterable[Generation]) -> None:
        """Hands in again what has left the queue and was never heard of."""
        gate = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._check(item, gate) for item in generations if item.unheard))

    async def _check(self, generation: Generation, gate: asyncio.Semaphore) -> None:
        sequence = generation.intake_sequence
        async with gate:
            try:
                await self._bus.jetstream().get_msg(subjects.INTAKE_STREAM, sequence)
            except NotFoundError:
                if generation.unheard and generation.intake_sequence == sequence:
                    self._recover(generation)
            except BROKER_ERRORS as error:
                log.debug("suspect_not_checked", error=reason_of(error))
                self.add([generation])

"""Requests of the batch lane of which nobody knows whether they are in the queue: looked for there.

They were taken over from a lost gateway, or the broker did not answer when they were handed in.

Batch work waits long, so most of what a lost gateway had of it was never in a ring. What is in the queue will
be dispatched, and its tokens come to the lost gateway's subject, which is read here too: to hand it in again
would have it computed twice. What has left the queue and was not heard of is handed in again.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from nats.js.errors import NotFoundError

from services.gateway.life.generation import Generation
from shared.messages import GenerationRequest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of

log = structlog.get_logger(__name__)

GATHER = 0.1
"""Seconds in which what is taken over gathers: one reading of the queue serves all of it."""
SETTLE = 0.5
"""Seconds after the reading in which a ring may still be heard."""


class QueuedRequests:
    """Looks once for all that comes within a moment."""

    def __init__(self, bus: Bus, recover: Callable[[Generation], None]) -> None:
        """`recover` hands in again."""
        self._bus = bus
        self._recover = recover
        self._waiting: list[Generation] = []

    def add(self, generation: Generation) -> bool:
        """Looks for it soon; True when a reading, `look`, has to be begun."""
        self._waiting.append(generation)
        return len(self._waiting) == 1

    async def look(self) -> None:
        """Hands in again what is not in the queue, once the broker says what is there."""
        await asyncio.sleep(GATHER)
        waiting, self._waiting = self._waiting, []
        found: dict[str, int] | None = None
        while found is None:
            found = await self._look({generation.request.model for generation in waiting})
            await asyncio.sleep(SETTLE)
        for generation in waiting:
            if generation.unheard and generation.id in found:
                generation.intake_sequence = found[generation.id]
            elif generation.unheard:
                self._recover(generation)

    async def _look(self, models: set[str]) -> dict[str, int] | None:
        """None: the broker does not answer."""
        found: dict[str, int] = {}
        try:
            for model in models:
                found |= await self._queued(model)
        except BROKER_ERRORS as error:
            log.info("queue_not_read", error=reason_of(error))
            return None
        return found

    async def _queued(self, model: str) -> dict[str, int]:
        """First attempts in the batch lane, by id, with their numbers in the stream."""
        subject, sequence = subjects.intake("batch", model), 0
        found: dict[str, int] = {}
        while True:
            try:
                message = await self._bus.jetstream().get_msg(
                    subjects.INTAKE_STREAM, seq=sequence + 1, subject=subject, next=True
                )
            except NotFoundError:
                return found
            sequence = message.seq or 0
            try:
                request = msgspec.msgpack.decode(message.data or b"", type=GenerationRequest)
            except msgspec.DecodeError:
                continue
            if not request.attempt:
                found[request.generation_id] = sequence

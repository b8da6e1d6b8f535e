"""Which rings are over, and what of the requests that may have been in them has to be handed in again.

`Losses` knows which lives of rings are over, as events and records tell it:

    up, serving record ──▶ alive          a ring that was given up and is heard again has not died
    down, gone, hung   ──▶ over           that epoch and all before it

Events and records come on two ways and can overtake each other: the monitor's time stamps tell which of two is
the newer one.

`Suspects` are requests of which no ring has said anything, when one that may have had them is lost. A leader names
itself to the gateway before it tells the scheduler that it has taken a request, so this is rare: the entry itself was
lost. A request that is still in the queue was in no ring; one that has left it, and of which the journal knows nothing
either, was in the one that was lost.

`QueuedRequests` are of the batch lane, and nobody knows whether they are in the queue: they were taken over from a lost
gateway, or the broker did not answer when they were handed in. Batch work waits long, so most of what a lost gateway
had of it was never in a ring. What is in the queue will be dispatched, and its tokens come to the lost gateway's
subject, which is read here too: to hand it in again would have it computed twice. What has left the queue and was not
heard of is handed in again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import msgspec
import structlog
from nats.js.errors import NotFoundError

from services.gateway.lifecycle.generation import Generation
from shared.messages import GenerationRequest, RingDeath
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of

log = structlog.get_logger(__name__)

SUSPICION = 1.0  # seconds after a loss before the queue is asked: acknowledgements may be on their way
AT_ONCE = 32  # questions to the broker at a time


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

    def add(self, generations: Iterable[Generation]) -> None:
        """These may have been in a ring that was lost just now."""
        self._suspects |= {generation.id: generation for generation in generations}
        if self._suspects:
            self._wanted.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
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
                log.debug("queue_check_failed", error=reason_of(error))
                self.add([generation])


GATHER = 0.1  # seconds in which what is taken over gathers: one reading of the queue serves all of it
SETTLE = 0.5  # seconds after the reading in which a ring may still be heard


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
            log.info("queue_read_failed", error=reason_of(error))
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


class _Loss(NamedTuple):
    epoch: int  # this one and all before it are over
    at: float  # the monitor's time, unix seconds; 0: not told
    heard_at: float  # when it was heard of here, monotonic seconds
    death: RingDeath | None = None  # its cause, where it is known


# Groups that are remembered: whose loss was heard of the longest time ago is forgotten first. Records that go on
# saying that a group is lost are taken for news of it then, which is heard of once more and does no harm.
MOST_GROUPS = 4096


class Losses:
    """The last life of each group that is over."""

    def __init__(self) -> None:
        self._last: dict[str, _Loss] = {}

    def lost(self, group: str, epoch: int, *, at: float, now: float, death: RingDeath | None = None) -> bool:
        """`epoch` of `group`, and all before it, are over since `at` (unix seconds; 0: not told).

        Returns whether that is new. `now`: monotonic seconds.
        """
        last = self._last.get(group)
        if last is not None and epoch <= last.epoch:
            return False
        self._last.pop(group, None)  # so that the newest is the last one
        self._last[group] = _Loss(epoch, max(at, last.at if last else 0.0), now, death)
        if len(self._last) > MOST_GROUPS:
            del self._last[next(iter(self._last))]
        return True

    def alive(self, group: str, epoch: int, *, at: float = 0.0) -> None:
        """`epoch` of `group` was alive at `at` (0: now): what was said of its end before is taken back."""
        last = self._last.get(group)
        if last is not None and last.epoch >= epoch and (not at or at >= last.at):
            self._last[group] = last._replace(epoch=epoch - 1)

    def over_since(self, group: str, epoch: int) -> float | None:
        """When the end of that life was heard of, in monotonic seconds; None while it is not over."""
        last = self._last.get(group)
        return last.heard_at if last is not None and epoch <= last.epoch else None

    def death_of(self, group: str, epoch: int) -> RingDeath | None:
        """What that life has died of, where its executor has told."""
        last = self._last.get(group)
        return last.death if last is not None and last.death is not None and last.death.epoch == epoch else None

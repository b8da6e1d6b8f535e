"""Tells rings and schedulers what nobody waits for any more.

    group known      Cancel at groups.<group>.control, answered by the ring's leader
    group unknown    broadcast to the schedulers, and the request is taken out of the queue

What is asked for in one turn of the event loop travels together. Each message is tried again, once, when
it was not taken: a ring that goes on decodes for nobody.

While the connection is away others may claim what this gateway owned. So nothing is left to nats-py's buffer, a
decision of an owner is tried again only for what is still its own, and it carries its claim (see `Claimed`): rings
and schedulers that know a newer one ignore it, however late it comes. A client's own wish holds whoever owns it.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog
from nats.js.errors import APIError

from services.gateway.lifecycle.claims import GenerationClaims
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import of_choice
from shared.errors import BrokerUnavailable, RyzansteinError
from shared.messages import Cancel, CancelRequest, Claimed, ControlCommand, ControlReply
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, broker_error
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

CONTROL_TIMEOUT = 2.0
RETRY_PAUSE = 0.25
ANY_ATTEMPT = -1
ANY_CLAIM = -1

_control = functools.lru_cache(maxsize=1024)(subjects.control)


class _Order(NamedTuple):
    """What is said of several generations in one message."""

    group: str  # whose leader is told; empty: the schedulers are
    attempt: int  # the last one to end
    claim: int
    news: bool = False  # whether it tells of the claim, and ends nothing


class Cancellations:
    """Sends them in the background; `stop` waits for what was begun."""

    def __init__(self, bus: Bus, claims: GenerationClaims) -> None:
        self._bus = bus
        self._claims = claims
        self._orders: dict[_Order, list[str]] = {}
        # Requests to take back: number in the intake stream, generation, claim.
        self._queued: list[tuple[int, str, int]] = []
        self._tasks = TaskSet("cancelling_failed")
        self._due: asyncio.Handle | None = None
        self._stopping = False
        self._wake = asyncio.Event()
        bus.on_reconnect(self._wake.set)

    @property
    def idle(self) -> bool:
        """Whether everything has been sent."""
        return self._due is None and not self._tasks

    def cancel(self, generation: Generation, *, by_owner: bool) -> None:
        """Nobody wants more of `generation`: its owner has decided so, or else its client."""
        claim = generation.claim if by_owner else ANY_CLAIM
        self._add(_Order(generation.group, ANY_ATTEMPT, claim), generation.id)
        if not generation.group and generation.intake_sequence:
            self._queued.append((generation.intake_sequence, generation.id, claim))

    def end(self, group: str, generation: Generation, attempt: int) -> None:
        """Attempts up to `attempt` of a generation are not wanted of `group`: another ring has them."""
        self._add(_Order(group, attempt, generation.claim), generation.id)

    def tell_claim(self, generation: Generation) -> None:
        """The ring that has the generation is told who owns it."""
        self._add(_Order(generation.group, ANY_ATTEMPT, generation.claim, news=True), generation.id)

    async def stop(self) -> None:
        """Sends what is left, without a second try."""
        self._stopping = True
        self._wake.set()
        if self._due is not None:
            self._due.cancel()
            self._send()
        await self._tasks.finished()

    def _add(self, order: _Order, generation_id: str) -> None:
        self._orders.setdefault(order, []).append(generation_id)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due = None
        orders, self._orders = self._orders, {}
        queued, self._queued = self._queued, []
        for order, ids in orders.items():
            self._tasks.spawn(self._try(functools.partial(self._say, order), ids, order.claim))
        if queued:
            self._tasks.spawn(self._withdraw_all(queued))

    async def _say(self, order: _Order, ids: Sequence[str]) -> None:
        if not order.group:
            await self._bus.publish(subjects.CANCEL, CancelRequest(list(ids), order.claim))
            return
        command: ControlCommand = Cancel(list(ids), order.attempt, order.claim)
        if order.news:
            command = Claimed(list(ids), order.claim)
        await self._bus.request(_control(order.group), command, ControlReply, timeout=CONTROL_TIMEOUT)

    async def _withdraw_all(self, queued: list[tuple[int, str, int]]) -> None:
        for sequence, generation_id, claim in queued:
            await self._try(functools.partial(self._withdraw, sequence), [generation_id], claim)

    async def _withdraw(self, sequence: int, ids: Sequence[str]) -> None:
        """Takes a request that no ring has accepted out of the queue: nobody would read its tokens."""
        try:
            await self._bus.jetstream().delete_msg(subjects.INTAKE_STREAM, sequence)
        except APIError as error:  # it has left the queue: the broadcast finds it
            log.debug("withdrawal_too_late", sequence=sequence, error=str(error))
        except BROKER_ERRORS as error:
            raise broker_error(f"take back the request {sequence} of the queue", error) from error

    async def _try(self, send: Callable[[Sequence[str]], Awaitable[None]], ids: list[str], claim: int) -> None:
        for last in (False, True):
            try:
                if not self._bus.connected:
                    raise BrokerUnavailable("NATS is unreachable; nothing is sent until it is back.")
                await send(ids)
                return
            except RyzansteinError as error:
                if last or self._stopping:
                    log.info("cancel_failed", error=str(error))
                    return
            await self._connected()
            if claim != ANY_CLAIM:
                ids = [one for one in ids if await self._still_ours(one)]
            if not ids:
                return

    async def _still_ours(self, generation_id: str) -> bool:
        """Whether no other gateway has claimed it. Where that cannot be known, it may have been."""
        try:
            return await self._claims.rival(of_choice(generation_id)) is None
        except RyzansteinError as error:
            log.info("cancel_failed", error=str(error))
            return False

    async def _connected(self) -> None:
        await asyncio.sleep(RETRY_PAUSE)
        while not self._bus.connected and not self._stopping:
            self._wake.clear()
            await self._wake.wait()

"""Tells rings and schedulers what nobody waits for any more.

    group known      Cancel at groups.<group>.control, answered by the ring's leader
    group unknown    broadcast to the schedulers, and the request is taken out of the queue

What is asked for in one turn of the event loop travels together. Each message is tried again, once, when
it was not taken: a ring that goes on decodes for nobody.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from nats.js.errors import APIError

from services.gateway.life.generation import Generation
from shared import subjects
from shared.broker_errors import BROKER_ERRORS, broker_error
from shared.bus import Bus
from shared.errors import RyzansteinError
from shared.messages import Cancel, CancelRequest, ControlReply

log = structlog.get_logger(__name__)

CONTROL_TIMEOUT = 2.0
RETRY_PAUSE = 0.25
ANY_ATTEMPT = -1

_control = functools.lru_cache(maxsize=1024)(subjects.control)


class Cancellations:
    """Sends them in the background; `stop` waits for what was begun."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._commands: dict[tuple[str, int], list[str]] = {}
        """Generation ids by group and last attempt to end."""
        self._unplaced: list[str] = []
        self._queued: list[int] = []
        """Numbers in the intake stream of requests to take back."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: asyncio.Handle | None = None
        self._stopping = False
        self._wake = asyncio.Event()
        bus.on_reconnect(self._wake.set)

    @property
    def idle(self) -> bool:
        """Whether everything has been sent."""
        return self._due is None and not self._tasks

    def cancel(self, generation: Generation) -> None:
        """Nobody wants more of `generation`."""
        if generation.group:
            self.end(generation.group, generation.id, ANY_ATTEMPT)
            return
        self._unplaced.append(generation.id)
        if generation.intake_sequence:
            self._queued.append(generation.intake_sequence)
        self._schedule()

    def end(self, group: str, generation_id: str, attempt: int) -> None:
        """Attempts up to `attempt` of a generation are not wanted of `group`: another ring has them."""
        self._commands.setdefault((group, attempt), []).append(generation_id)
        self._schedule()

    async def stop(self) -> None:
        """Sends what is left, without a second try."""
        self._stopping = True
        self._wake.set()
        if self._due is not None:
            self._due.cancel()
            self._send()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _schedule(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due = None
        commands, self._commands = self._commands, {}
        unplaced, self._unplaced = self._unplaced, []
        queued, self._queued = self._queued, []
        for (group, attempt), ids in commands.items():
            self._spawn(self._try(functools.partial(self._command, group, Cancel(ids, attempt))))
        if unplaced:
            self._spawn(self._try(functools.partial(self._broadcast, CancelRequest(unplaced))))
        if queued:
            self._spawn(self._withdraw_all(queued))

    async def _command(self, group: str, command: Cancel) -> None:
        await self._bus.request(_control(group), command, ControlReply, timeout=CONTROL_TIMEOUT)

    async def _broadcast(self, request: CancelRequest) -> None:
        await self._bus.publish(subjects.CANCEL, request)

    async def _withdraw_all(self, sequences: list[int]) -> None:
        for sequence in sequences:
            await self._try(functools.partial(self._withdraw, sequence))

    async def _withdraw(self, sequence: int) -> None:
        """Takes a request that no ring has accepted out of the queue: nobody would read its tokens."""
        try:
            await self._bus.jetstream().delete_msg(subjects.INTAKE_STREAM, sequence)
        except APIError as error:  # it has left the queue: the broadcast finds it
            log.debug("not_withdrawn", sequence=sequence, error=str(error))
        except BROKER_ERRORS as error:
            raise broker_error(f"take back the request {sequence} of the queue", error) from error

    async def _try(self, send: Callable[[], Awaitable[None]]) -> None:
        for last in (False, True):
            try:
                await send()
                return
            except RyzansteinError as error:
                if last or self._stopping:
                    log.info("not_cancelled", error=str(error))
                    return
            await self._connected()

    async def _connected(self) -> None:
        await asyncio.sleep(RETRY_PAUSE)
        while not self._bus.connected and not self._stopping:
            self._wake.clear()
            await self._wake.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("cancelling_failed", error=str(error))

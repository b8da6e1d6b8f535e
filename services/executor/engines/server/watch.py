"""Whether the server is still there, still the same one, and still computing.

    each HEALTH_SECONDS     /health     refused, or not well     ─▶ lost
                            progress    the mark has changed     ─▶ a step
    each IDENTITY_SECONDS   identify    another model or version ─▶ lost
    a connection breaks     both, at once, for all whose connection broke

That /health answers is no sign of progress: it comes from a thread that goes on while the engine hangs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from services.executor.engines.server.client import ServerClient, ServerFault
from services.executor.engines.server.dialects.base import Identity, ServerDialect
from shared.errors import ConfigurationError, RingLost, Unavailable, reason_of

HEALTH_SECONDS = 1.0
IDENTITY_SECONDS = 10.0
ANSWER_SECONDS = 5.0  # for an answer to one look; a busy server that takes longer is not judged by it
# Without an answer to /health, and without progress: then nobody is there, as when a host has lost its power.
SILENCE_SECONDS = 60.0

T = TypeVar("T")


class Watch:
    def __init__(
        self, client: ServerClient, dialect: ServerDialect, identity: Identity, on_progress: Callable[[float], None]
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._identity = identity
        self._on_progress = on_progress
        self._mark = ""
        self._answered = asyncio.get_running_loop().time()
        self._look: asyncio.Task[RingLost | None] | None = None  # for broken connections

    async def run(self) -> None:
        """Raises `RingLost`, at last."""
        loop = asyncio.get_running_loop()
        known = loop.time()
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._check_health()
            if loop.time() - known >= IDENTITY_SECONDS:
                await self._check_identity()
                known = loop.time()
            await self._see_progress()

    async def confirm(self) -> None:
        """After a connection broke: raises `RingLost` where the server is gone, or another one. Looks once for all
        that ask meanwhile."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._check_both())
        if (lost := await asyncio.shield(self._look)) is not None:
            raise lost

    def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()

    async def _check_both(self) -> RingLost | None:
        try:
            await self._check_health()
            await self._check_identity()
        except RingLost as lost:
            return lost
        return None

    async def _check_health(self) -> None:
        answer = await self._answer(lambda: self._client.ask("/health"))
        now = asyncio.get_running_loop().time()
        if answer is None:
            if now - self._answered > SILENCE_SECONDS:
                raise RingLost(f"{self._client.name} has not answered /health for {now - self._answered:.0f} s")
            return
        self._answered = now
        if answer.status != 200:
            said = self._client.sentence(answer)
            raise RingLost(f"{self._client.name} is not well: /health answers {answer.status} ({said})")

    async def _check_identity(self) -> None:
        try:
            identity = await self._answer(self._dialect.identify)
        except (ConfigurationError, Unavailable, ServerFault) as error:
            raise RingLost(f"{self._client.name} is not what it was, {self._identity}: {error}") from None
        if identity not in (None, self._identity):
            raise RingLost(f"{self._client.name} was {self._identity}, and is {identity} now: start the group anew")

    async def _see_progress(self) -> None:
        try:
            mark, kv_used = await self._answer(self._dialect.progress) or ("", 0.0)
        except (ServerFault, ValueError):  # it tells of itself in a way that is not known: that is no reason to end
            return
        known, self._mark = self._mark, mark or self._mark
        if known not in ("", self._mark):  # the first one tells nothing
            self._answered = asyncio.get_running_loop().time()
            self._on_progress(kv_used)

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """None: it has not answered in time, which a busy server may."""
        for last in (False, True):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await ask()
            except (TimeoutError, httpx.TimeoutException):
                return None
            except httpx.TransportError as error:
                # The first one may have met a kept connection that the server closes just then.
                if last:
                    why = reason_of(error)
                    raise RingLost(f"{self._client.name} does not answer any more ({why})") from None
        raise AssertionError("the last try returns or raises")

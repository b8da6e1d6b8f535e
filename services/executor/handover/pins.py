"""Session pins of a ring that leaves: each is moved to who has the session's blocks by now, by compare-and-set."""

import asyncio
from collections.abc import Sequence

import structlog

from shared.errors import RyzansteinError
from shared.messages import SessionPin
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key

log = structlog.get_logger(__name__)

AT_A_TIME = 64
"""Sessions that are asked for, or moved, at once."""


class PinMover:
    """Reads and moves pins. Without an answer from the broker they stay as they are: the next turn is placed by
    load then, and finds no cache."""

    def __init__(self, bus: Bus, model: str, group: str, ttl: float) -> None:
        self._bus = bus
        self._model = model
        self._group = group
        self._ttl = ttl
        self._bucket: Bucket[SessionPin] | None = None
        self._away = False
        """Whether the broker has not answered: it is not waited for again, since the ring has little time."""

    async def groups(self, sessions: Sequence[str]) -> list[str]:
        """Where each is pinned to; empty: nowhere, as far as can be told."""
        found: list[str] = []
        for start in range(0, len(sessions), AT_A_TIME):
            some = sessions[start : start + AT_A_TIME]
            found += await asyncio.gather(*(self._group_of(session) for session in some))
        return found

    async def move(self, sessions: Sequence[str], group: str, epoch: int) -> None:
        """From this ring, or from nowhere, to another; what a scheduler has pinned elsewhere stays there."""
        for start in range(0, len(sessions), AT_A_TIME):
            some = sessions[start : start + AT_A_TIME]
            await asyncio.gather(*(self._move(session, SessionPin(group, epoch)) for session in some))

    async def _group_of(self, session: str) -> str:
        if self._away:
            return ""
        try:
            entry = await (await self._open()).get(pin_key(self._model, session))
        except RyzansteinError:
            self._away = True
            return ""
        return "" if entry is None else entry.value.group

    async def _move(self, session: str, pin: SessionPin) -> None:
        if self._away:
            return
        key = pin_key(self._model, session)
        try:
            bucket = await self._open()
            entry = await bucket.get(key)
            if entry is None:
                await bucket.create(key, pin)
            elif entry.value.group == self._group:
                await bucket.update(key, pin, entry.revision)
        except RyzansteinError as error:
            self._away = True
            log.warning("session_not_moved", error=str(error))

    async def _open(self) -> Bucket[SessionPin]:
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=self._ttl)
        return self._bucket

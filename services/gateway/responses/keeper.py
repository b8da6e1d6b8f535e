"""Keeps responses when they have ended: every gateway those that it looks after, and a lost one's its heir.

Two gateways that both take themselves for the owner keep the same: what is kept is a function of the log.
"""

import asyncio

import structlog

from services.gateway.life.answer import Answer
from services.gateway.life.answers import Answers
from services.gateway.readers.reading import Reading
from services.gateway.responses.kept import stored_of
from services.gateway.responses.store import ResponseStore
from shared.errors import RyzansteinError
from shared.records import GenerationRecord

log = structlog.get_logger(__name__)

TRIES = 5
PAUSE = 0.5
"""Seconds before a response is written once more; each time twice as long."""
KEEP = 30.0
"""Seconds that it may take to read the log of a lost gateway's response."""


class ResponseKeeper:
    def __init__(self, store: ResponseStore, answers: Answers, reading: Reading) -> None:
        self._store = store
        self._answers = answers
        self._reading = reading
        self._writing: dict[str, asyncio.Event] = {}

    async def keep(self, answer: Answer) -> None:
        """Writes an answer that has ended, if it is a response that is to be kept."""
        response = answer.record.response
        if response is None or not response.store:
            return
        if answer.generations[0].state == "cancelled" and not answer.resumable:
            return  # its client went before it knew the id
        if answer.identity in self._writing:
            return
        written = self._writing[answer.identity] = asyncio.Event()
        try:
            await self._write(answer)
        finally:
            del self._writing[answer.identity]
            written.set()

    async def written(self, identity: str) -> None:
        """Returns at once, or when what is being written of `identity` is there: its client may be quick."""
        if (writing := self._writing.get(identity)) is not None:
            await writing.wait()

    async def _write(self, answer: Answer) -> None:
        pause = PAUSE
        for _ in range(TRIES):
            try:
                await self._store.keep(stored_of(answer, await self._reading.shown(answer)))
                return
            except RyzansteinError as error:
                log.warning("response_not_kept", response=answer.public_id, error=str(error))
            await asyncio.sleep(pause)
            pause *= 2

    async def keep_of_lost(self, record: GenerationRecord) -> None:
        """Writes a response that had ended when its gateway was lost, unless that has done it."""
        if record.response is None or await self._store.is_known(record.identity):
            return
        answer = await self._answers.inherit(record, keep=KEEP)
        if answer.ended:
            await self.keep(answer)

"""Keeps what outlives the journal: every gateway the answers that it looks after, and a lost one's its heir.

Two gateways that both take themselves for the owner keep the same: what is kept is a function of the log.
"""

import asyncio
from typing import Protocol

import structlog

from services.gateway.life.answer import Answer
from services.gateway.life.answers import Answers
from shared.errors import RyzansteinError
from shared.messages.records import GenerationRecord

log = structlog.get_logger(__name__)

TRIES = 5
PAUSE = 0.5
"""Seconds before an answer is written once more; each time twice as long."""
KEEP = 30.0
"""Seconds that it may take to read the log of a lost gateway's answer."""


class Shelf(Protocol):
    """Where answers of one kind are kept."""

    async def put(self, answer: Answer) -> None:
        """Writes an answer that has ended, unless it is there or was deleted. Raises `BrokerUnavailable`."""

    async def has(self, record: GenerationRecord) -> bool:
        """Whether it is there, or was deleted. Raises `BrokerUnavailable`."""


class Keeper:
    """Answers of each kind go to their shelf."""

    def __init__(self, answers: Answers, responses: Shelf, chats: Shelf) -> None:
        self._answers = answers
        self._responses = responses
        self._chats = chats
        self._writing: dict[str, asyncio.Event] = {}

    async def keep(self, answer: Answer) -> None:
        """Writes an answer that has ended, if it is to be kept."""
        if not answer.record.outlives or answer.identity in self._writing:
            return
        if answer.generations[0].state == "cancelled" and not answer.resumable:
            return  # its client went before it knew the id
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
                await self._shelf(answer.record).put(answer)
                return
            except RyzansteinError as error:
                log.warning("answer_not_kept", generation=answer.public_id, error=str(error))
            await asyncio.sleep(pause)
            pause *= 2

    async def keep_of_lost(self, record: GenerationRecord) -> None:
        """Writes an answer that had ended when its gateway was lost, unless that has done it."""
        if not record.outlives or await self._shelf(record).has(record):
            return
        answer = await self._answers.inherit(record, keep=KEEP)
        if answer.ended:
            await self.keep(answer)

    def _shelf(self, record: GenerationRecord) -> Shelf:
        return self._chats if record.response is None else self._responses

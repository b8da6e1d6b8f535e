"""Keeps what outlives the journal: every gateway the answers that it looks after, and a lost one's its heir.

Two gateways that both take themselves for the owner keep the same: what is kept is a function of the log.
"""

import asyncio
from typing import Protocol

import msgspec
import structlog

from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.lifecycle.token_stream import GenerationLimits
from services.gateway.persistence.budget import beside_loop
from services.gateway.persistence.conversations import Conversations
from services.gateway.persistence.items import turn_of
from services.gateway.persistence.store import ResponseStore
from services.gateway.streams.reading import Runs
from shared.errors import RyzansteinError, Unavailable, error_from_code
from shared.messages import TokenEntry
from shared.messages.records import GenerationRecord, StoredResponse

log = structlog.get_logger(__name__)

TRIES = 5
PAUSE = 0.5  # seconds before an answer is written once more; each time twice as long


class Shelf(Protocol):
    """Where answers of one kind are kept."""

    async def put(self, answer: RequestState) -> None:
        """Writes an answer that has ended, unless it is there or was deleted. Raises `BrokerUnavailable`."""

    async def has(self, record: GenerationRecord) -> bool:
        """Whether it is there, or was deleted. Raises `BrokerUnavailable`."""


class ResponseArchive:
    """Answers of each kind go to their shelf."""

    def __init__(self, responses: Shelf, chats: Shelf) -> None:
        self._responses = responses
        self._chats = chats
        self._writing: dict[str, asyncio.Event] = {}

    async def keep(self, answer: RequestState) -> None:
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

    async def wait_written(self, identity: str) -> None:
        """Returns at once, or when what is being written of `identity` is there: its client may be quick."""
        if (writing := self._writing.get(identity)) is not None:
            await writing.wait()

    async def _write(self, answer: RequestState) -> None:
        for tries in range(TRIES):
            try:
                await self._shelf(answer.record).put(answer)
                return
            except RyzansteinError as error:
                log.warning("response_store_failed", generation=answer.public_id, error=str(error))
            await asyncio.sleep(PAUSE * 2**tries)

    async def has(self, record: GenerationRecord) -> bool:
        """Whether it is kept, or was deleted. Raises `BrokerUnavailable`."""
        return await self._shelf(record).has(record)

    def _shelf(self, record: GenerationRecord) -> Shelf:
        return self._chats if record.response is None else self._responses


_LIMITS = GenerationLimits(0, float("inf"), float("inf"))
_SOURCE = "store"


def stored_of(answer: RequestState, response: bytes) -> StoredResponse:
    """`response`: the object as JSON. Only the length of the prompt is of interest from now on, unless its token ids
    are shown."""
    (generation,) = answer.generations
    request = generation.request
    prompt = request.prompt if answer.record.token_ids else [0] * len(request.prompt)
    wire = msgspec.structs.replace(request, prompt=prompt, generated=[], attempt=0)
    error = generation.error
    return StoredResponse(
        record=msgspec.structs.replace(answer.record, requests=[wire]),
        tokens=generation.tokens,
        response=response,
        finish="cancelled" if generation.state == "cancelled" else generation.finish,
        scores=generation.scores,
        cached_tokens=generation.cached_tokens,
        error_code=error.code if error else "",
        error=error.message if error else "",
    )


def answer_of(stored: StoredResponse) -> RequestState:
    """An answer that has ended, for readers to attach to."""
    record = stored.record
    generation = Generation(record.requests[0], 0, _LIMITS, now=0.0, started_at=record.created)
    finish = stored.finish if stored.finish in ("stop", "length") else ""
    entry = TokenEntry(generation.id, 0, 0, stored.tokens, finish, stored.scores, cached_tokens=stored.cached_tokens)
    generation.on_entry(_SOURCE, 1, entry, 0.0)
    if stored.finish == "cancelled":
        generation.cancel(Unavailable(stored.error or "The response was cancelled."))
    elif stored.error_code:
        generation.fail(error_from_code(stored.error_code, stored.error))
    return RequestState(record, [generation], owner=_SOURCE, owned=False, quiet_since=0.0, consumers=[])


class ResponseShelf:
    def __init__(self, store: ResponseStore, runs: Runs, conversations: Conversations) -> None:
        self._store = store
        self._runs = runs
        self._conversations = conversations

    async def put(self, answer: RequestState) -> None:
        """Its turn of a conversation first: what is kept is not looked at again."""
        response, _ = await self._runs.response(answer, None)
        record = answer.record
        if record.response is not None and (conversation := record.response.conversation):
            own = record.response.items
            turn = await beside_loop(len(own) + len(response), turn_of, own, response)
            await self._conversations.end(conversation, record.tenant, answer.identity, turn.added)
        await self._store.keep(stored_of(answer, response))

    async def has(self, record: GenerationRecord) -> bool:
        return await self._store.is_known(record.identity, record.tenant)

"""From an answer that has ended to what is kept of it, and back."""

import asyncio

import msgspec

from services.gateway.life.answer import Answer
from services.gateway.life.decisions import Limits
from services.gateway.life.generation import Deliver, Generation
from services.gateway.readers.reading import Reading
from services.gateway.responses.store import ResponseStore
from shared.errors import Unavailable, error_from_code
from shared.messages import TokenEntry
from shared.messages.records import GenerationRecord, StoredResponse

_LIMITS = Limits(0, float("inf"), float("inf"))
_SOURCE = "store"


def stored_of(answer: Answer, response: bytes) -> StoredResponse:
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


def answer_of(stored: StoredResponse) -> Answer:
    """An answer that has ended, for readers to attach to."""
    record = stored.record
    generation = Generation(record.requests[0], 0, _LIMITS, now=0.0, started_at=record.created)
    finish = stored.finish if stored.finish in ("stop", "length") else ""
    log = TokenEntry(
        generation.id, 0, 0, stored.tokens, finish, stored.scores, cached_tokens=stored.cached_tokens
    )
    generation.on_entry(_SOURCE, 1, log, 0.0)
    if stored.finish == "cancelled":
        generation.cancel(Unavailable(stored.error or "The response was cancelled."))
    elif stored.error_code:
        generation.fail(error_from_code(stored.error_code, stored.error))
    return Answer(record, [generation], owner=_SOURCE, owned=False, now=0.0)


class ResponseShelf:
    """Responses that have ended."""

    def __init__(self, store: ResponseStore, reading: Reading) -> None:
        self._store = store
        self._reading = reading

    async def put(self, answer: Answer) -> None:
        await self._store.keep(stored_of(answer, await self._reading.shown(answer)))

    async def has(self, record: GenerationRecord) -> bool:
        return await self._store.is_known(record.identity, record.tenant)


class StoreOwner:
    """Owns the answers that come from the store: they have ended, so there is nothing to decide."""

    async def submit(self, answer: Answer, *, record_first: bool = False) -> "asyncio.Future[None]":
        raise AssertionError("a response of the store has been handed in long ago")

    def join(self, answer: Answer, deliver: Deliver) -> None:
        for generation in answer.generations:
            generation.attach(deliver)

    def leave(self, answer: Answer, deliver: Deliver) -> None:
        for generation in answer.generations:
            generation.detach(deliver)

    def cancel(self, answer: Answer) -> None:
        """It has ended."""

    def end_choice(self, answer: Answer, index: int) -> None:
        """It has ended."""

"""Responses by their id: from the store, or from the journal while they go on or have just ended.

id ──▶ known here, still going? ──yes──▶ its log
         │ no
         ▼
       store ──deleted──▶ 404
         │ nothing             └─kept──▶ an answer made of it
         ▼
       journal ──▶ its log; should it have ended, it is kept now
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.core.errors import RouteError
from services.gateway.core.tenant_pool import TenantPool
from services.gateway.lifecycle.request_state import PREFIXES, RequestState, parse
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.persistence.budget import ByteBudget, HistoryBudget, beside_loop
from services.gateway.persistence.conversations import Conversations
from services.gateway.persistence.items import ResponseTurn, StoredItem, split, turn_of
from services.gateway.persistence.keeper import ResponseArchive, answer_of
from services.gateway.persistence.store import ResponseStore
from services.gateway.streams.numbered_reader import NumberedReader
from services.gateway.streams.reading import Runs
from services.gateway.streams.stream_reader import StreamReader
from shared.messages.records import GenerationRecord, StoredResponse

_PREFIX = PREFIXES["responses"]


# A response that goes on, or that the store does not have yet; or one that it has.
Found = RequestState | StoredResponse


def _own_items(found: Found) -> bytes:
    response = found.record.response
    assert response is not None, "it is a response"
    return response.items


def not_found(public_id: str) -> RouteError:
    """The error for an id of which nothing is kept."""
    return RouteError(
        f"Response with id '{public_id[:64]}' not found: the id is wrong, it was made with store false or has been "
        "deleted, or it is older than responses are kept.",
        reason="response_not_found",
    )


class ResponseLookup:
    """The same for all routes, and for requests that go on with a response. Methods raise `BrokerUnavailable`."""

    def __init__(self, store: ResponseStore, keeper: ResponseArchive, answers: RequestTracker, runs: Runs) -> None:
        self._store = store
        self._keeper = keeper
        self._answers = answers
        self._runs = runs

    async def find(self, public_id: str, tenant: str, reads: ByteBudget) -> Found:
        """Raises `RouteError` where there is none; another tenant's is not there either. `reads`: as
        `ResponseStore.get`."""
        found = await self._find(public_id, tenant, reads)
        if found.record.requests[0].tenant != tenant:
            raise not_found(public_id)
        return found

    async def _find(self, public_id: str, tenant: str, reads: ByteBudget) -> Found:
        identity = parse(public_id) if public_id.startswith(_PREFIX) else None
        if identity is None:
            raise not_found(public_id)
        answer = self._answers.get(identity)
        if answer is None or answer.ended:
            await self._keeper.wait_written(identity)
            stored = await self._store.get(identity, tenant, reads)
            if stored is not None:
                return stored
            answer = await self._of_journal(public_id, identity, tenant)
        if not self._to_be_kept(answer.record):
            raise not_found(public_id)
        return answer

    async def _of_journal(self, public_id: str, identity: str, tenant: str) -> RequestState:
        if await self._store.is_deleted(identity, tenant):
            raise not_found(public_id)
        try:
            answer = await self._answers.find(public_id, identity, tenant)
        except RouteError:
            raise not_found(public_id) from None
        if answer.ended and self._to_be_kept(answer.record):
            self._answers.spawn(self._keeper.keep(answer))
        return answer

    def _to_be_kept(self, record: GenerationRecord) -> bool:
        response = record.response
        return response is not None and response.store and record.created + self._store.ttl > time.time()

    async def response_json(self, found: Found) -> bytes:
        """The response object as JSON."""
        if isinstance(found, StoredResponse):
            return found.response
        response, _ = await self._runs.response(found, self._answers)
        return response

    async def items(self, found: Found) -> list[StoredItem]:
        """The items of its own input."""
        data = _own_items(found)
        return await beside_loop(len(data), split, data)

    async def turn(self, found: Found) -> ResponseTurn:
        """What it adds to a conversation."""
        own, response = _own_items(found), await self.response_json(found)
        return await beside_loop(len(own) + len(response), turn_of, own, response)

    async def read(self, found: Found, after: Sequence[int] | None, *, obfuscated: bool = False) -> StreamReader:
        """A reading of its events that has begun, behind event `after`; None: from the first. `obfuscated`: its
        deltas are padded. Raises `QueueFull`, `UnknownModel`, `Unavailable`."""
        if isinstance(found, StoredResponse):
            run = await self._runs.open(answer_of(found), None, after)
        else:
            run = await self._runs.open(found, self._answers, after)
        assert isinstance(run, NumberedReader), "it is a response"
        run.obfuscated = obfuscated
        run.join()
        return run

    def cancel(self, found: Found) -> None:
        """Ends it, for everybody. Another gateway's ends when the log says so."""
        if isinstance(found, RequestState) and not found.ended:
            self._answers.cancel(found)

    async def delete(self, found: Found) -> None:
        """Nothing of it is shown any more; what goes on is cancelled."""
        self.cancel(found)
        await self._store.delete(found.record.identity, found.record.tenant)

    async def refresh(self, found: Found) -> None:
        """It is a part of a conversation that goes on."""
        if isinstance(found, StoredResponse):
            await self._store.refresh(found.record.identity, found.record.tenant)


class StoredTurns(NamedTuple):
    """What requests go on with, and what they may have of it."""

    responses: ResponseLookup
    conversations: Conversations
    most: int  # bytes of stored items, by one request
    pool: TenantPool  # of all requests

    def budget(self, tenant: str) -> HistoryBudget:
        """For one request, which holds its items until it leaves the context."""
        return HistoryBudget(self.most, self.pool, tenant)

"""Stored chat completions by their id and in lists: their index in the bucket `chats`, and the shelf that fills it.

The answer lies among the responses (`store.py`), which has room for large ones; in the index stands what lists look at,
and the metadata, which can be changed.

    put:     answer ──▶ entry      an entry without an answer is never shown
    delete:  tombstone of the answer ──▶ entry gone
"""

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.core.errors import RouteError
from services.gateway.core.pagination import Order, PageQuery, list_object, page, shown_raw
from services.gateway.lifecycle.request_state import PREFIXES, RequestState, parse
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.persistence.budget import HistoryBudget, beside_loop
from services.gateway.persistence.keeper import ResponseArchive
from services.gateway.persistence.store import ResponseStore
from services.gateway.streams.reading import Runs
from shared.limits import RESPONSE_BYTES
from shared.messages.records import GenerationRecord, StoredChat, StoredResponse
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.tenants import Quota, TenantBucket, Trimmed


class ChatIndex:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float, quota: Quota) -> None:
        """`ttl`: seconds that an entry is kept after its last change; `quota`: of a tenant, whose oldest make room."""
        self.bucket = TenantBucket(bus, subjects.CHATS_BUCKET, StoredChat, lambda chat: chat.tenant, ttl=ttl)
        self._trimmed = Trimmed(self.bucket, quota)

    async def add(self, chat: StoredChat) -> None:
        """Unless there is an entry of it."""
        if await self.bucket.create(chat.tenant, chat.identity, chat) is not None:
            self._trimmed.wrote(chat.tenant, len(encode(chat)))

    async def get(self, identity: str, tenant: str) -> StoredChat | None:
        entry = await self.bucket.get(tenant, identity)
        return None if entry is None else entry.value

    async def of(self, tenant: str) -> list[StoredChat]:
        """Those of a tenant, in no order."""
        return [entry.value async for entry in self.bucket.of(tenant)]

    async def change(self, identity: str, tenant: str, metadata: dict[str, str]) -> StoredChat | None:
        """None where there is no entry."""
        described = partial(msgspec.structs.replace, metadata=metadata)
        return await self.bucket.change(tenant, identity, described, f"the chat completion {identity}")

    async def remove(self, identity: str, tenant: str) -> None:
        entry = await self.bucket.get(tenant, identity)
        if entry is not None:
            await self.bucket.purge(entry.key)


class ChatStore:
    """Chat completions that have ended."""

    def __init__(self, index: ChatIndex, store: ResponseStore, runs: Runs) -> None:
        self._index = index
        self._store = store
        self._runs = runs

    async def put(self, answer: RequestState) -> None:
        """One that was cancelled or failed is not stored: it has no answer."""
        completion, finished = await self._runs.response(answer, None)
        if not finished:
            return
        await self._store.keep(_stored(answer, completion))
        if not await self._store.is_deleted(answer.identity, answer.record.tenant):
            await self._index.add(_entry(answer))

    async def has(self, record: GenerationRecord) -> bool:
        name = record.identity, record.tenant
        return await self._index.get(*name) is not None or await self._store.is_deleted(*name)


def _stored(answer: RequestState, completion: bytes) -> StoredResponse:
    """Its text is in `completion`: prompts and tokens are of no use any more."""
    requests = [
        msgspec.structs.replace(request, prompt=[], generated=[], attempt=0) for request in answer.record.requests
    ]
    return StoredResponse(msgspec.structs.replace(answer.record, requests=requests), [], completion)


def _entry(answer: RequestState) -> StoredChat:
    record = answer.record
    return StoredChat(
        identity=answer.identity,
        id=answer.public_id,
        tenant=record.tenant,
        model=record.model_shown,
        created_at=record.created,
        metadata=record.metadata,
    )


class MessagesQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A page of a chat's messages."""

    order: Order = "asc"


class ChatsQuery(MessagesQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A page of chats."""

    model: Annotated[str, Meta(description="Only those of this model.")] | None = None
    metadata: dict[str, str] = {}

    def takes(self, chat: StoredChat) -> bool:
        """Whether `chat` is in the list."""
        return self.model in (None, chat.model) and self.metadata.items() <= chat.metadata.items()


class ShownMessage(msgspec.Struct, frozen=True):
    """A message of a stored conversation."""

    id: str
    created_at: float  # its place: messages have no times of their own
    shown: dict[str, Any]


def shown_messages(chat_id: str, messages: bytes) -> list[ShownMessage]:
    """What the request brought, each with an id."""
    given: list[dict[str, Any]] = msgspec.json.decode(messages) if messages else []
    found = []
    for place, message in enumerate(given):
        parts = message.get("content") if isinstance(message.get("content"), list) else None
        said = {key: value for key, value in _given(message).items() if key != "content"}
        text = "".join(part.get("text") or "" for part in parts) if parts is not None else message["content"]
        identity = f"{chat_id}-{place}"
        shown = {"id": identity, "content": text, "refusal": None, **said}
        shown["content_parts"] = None if parts is None else [_given(part) for part in parts]
        found.append(ShownMessage(identity, float(place), shown))
    return found


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


_PREFIX = PREFIXES["chat.completions"]


def not_found(public_id: str) -> RouteError:
    """The error for an id of which nothing is stored, or another tenant's."""
    return RouteError(
        f"Chat completion with id '{public_id[:64]}' not found: the id is wrong, it was made without store true, has "
        "not ended or has been deleted, or it is older than answers are kept.",
        reason="chat_completion_not_found",
    )


class StoredChats:
    """Methods raise `BrokerUnavailable`, and `RouteError` for an id of which the tenant has stored nothing."""

    def __init__(
        self, index: ChatIndex, store: ResponseStore, keeper: ResponseArchive, answers: RequestTracker
    ) -> None:
        self._index = index
        self._store = store
        self._keeper = keeper
        self._answers = answers

    async def get(self, public_id: str, tenant: str, budget: HistoryBudget) -> bytes:
        """The completion with its metadata, as JSON."""
        return _completion(*await self._found(public_id, tenant, budget))

    async def listed(self, tenant: str, wanted: ChatsQuery, budget: HistoryBudget) -> bytes:
        """A page, as JSON: one chat at least, and no more than `budget` has room for."""
        chats = [chat for chat in await self._index.of(tenant) if wanted.takes(chat)]
        chosen, more = page(chats, after=wanted.after, limit=wanted.limit, ascending=wanted.order == "asc")
        data: list[tuple[str, msgspec.Raw]] = []
        for chat in chosen:
            if budget.reads.left < RESPONSE_BYTES.value:
                more = True
                break
            stored = await self._store.get(chat.identity, tenant, budget.reads)
            if stored is None:  # the oldest have made room
                continue
            if data and len(stored.response) > budget.items.left:
                more = True
                break
            budget.items.use(len(stored.response))
            completion = await beside_loop(len(stored.response), _completion, chat, stored)
            data.append((chat.id, msgspec.Raw(completion)))
        return msgspec.json.encode(shown_raw(data, more))

    async def messages(self, public_id: str, tenant: str, wanted: MessagesQuery, budget: HistoryBudget) -> bytes:
        """A page of what its request said, as JSON."""
        _, stored = await self._found(public_id, tenant, budget)
        messages = shown_messages(public_id, stored.record.messages)
        chosen, more = page(messages, after=wanted.after, limit=wanted.limit, ascending=wanted.order == "asc")
        return msgspec.json.encode(list_object([message.shown for message in chosen], more))

    async def change(self, public_id: str, tenant: str, metadata: dict[str, str], budget: HistoryBudget) -> bytes:
        """Its metadata, all of them, for others."""
        chat, stored = await self._found(public_id, tenant, budget)
        changed = await self._index.change(chat.identity, tenant, metadata)
        if changed is None:
            raise not_found(public_id)
        return _completion(changed, stored)

    async def delete(self, public_id: str, tenant: str, budget: HistoryBudget) -> None:
        """Nothing of it is shown any more, as a generation neither."""
        chat, _ = await self._found(public_id, tenant, budget)
        await self._store.delete(chat.identity, tenant)
        await self._index.remove(chat.identity, tenant)

    async def _found(self, public_id: str, tenant: str, budget: HistoryBudget) -> tuple[StoredChat, StoredResponse]:
        identity = parse(public_id) if public_id.startswith(_PREFIX) else None
        if identity is None:
            raise not_found(public_id)
        await self._keeper.wait_written(identity)
        found = await self._kept(identity, tenant, budget)
        found = found or await self._of_journal(public_id, identity, tenant, budget)
        if found is None or found[0].tenant != tenant:
            raise not_found(public_id)
        return found

    async def _kept(
        self, identity: str, tenant: str, budget: HistoryBudget
    ) -> tuple[StoredChat, StoredResponse] | None:
        chat = await self._index.get(identity, tenant)
        stored = None if chat is None else await self._store.get(identity, tenant, budget.reads)
        return None if chat is None or stored is None else (chat, stored)

    async def _of_journal(
        self, public_id: str, identity: str, tenant: str, budget: HistoryBudget
    ) -> tuple[StoredChat, StoredResponse] | None:
        """It has ended a moment ago at another gateway, or at one that was lost: it is kept now."""
        try:
            answer = await self._answers.find(public_id, identity, tenant)
        except RouteError:
            return None
        if not (answer.ended and answer.record.is_stored_chat):
            return None
        await self._keeper.keep(answer)
        await self._keeper.wait_written(identity)  # somebody else may be at it
        return await self._kept(identity, tenant, budget)


def _completion(chat: StoredChat, stored: StoredResponse) -> bytes:
    whole: dict[str, Any] = msgspec.json.decode(stored.response, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(whole | {"metadata": chat.metadata})

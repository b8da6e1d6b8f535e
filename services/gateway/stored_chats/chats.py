"""Stored chat completions by their id and in lists."""

from typing import Any

import msgspec

from services.gateway.errors import RouteError
from services.gateway.files.listing import page, shown
from services.gateway.life.answers import Answers
from services.gateway.life.identity import PREFIXES, parse
from services.gateway.life.keeper import Keeper
from services.gateway.responses.store import ResponseStore
from services.gateway.stored_chats.index import ChatIndex
from services.gateway.stored_chats.queries import Wanted, shown_messages
from shared.messages.records import StoredChat, StoredResponse

_PREFIX = PREFIXES["chat.completions"]


def not_found(public_id: str) -> RouteError:
    """The error for an id of which nothing is stored, or another tenant's."""
    return RouteError(
        f"Chat completion with id '{public_id[:64]}' not found: the id is wrong, it was made without store true, has "
        "not ended or has been deleted, or it is older than answers are kept.",
        status=404,
        reason="chat_completion_not_found",
    )


class StoredChats:
    """Methods raise `BrokerUnavailable`, and `RouteError` for an id of which the tenant has stored nothing."""

    def __init__(self, index: ChatIndex, store: ResponseStore, keeper: Keeper, answers: Answers) -> None:
        self._index = index
        self._store = store
        self._keeper = keeper
        self._answers = answers

    async def get(self, public_id: str, tenant: str) -> bytes:
        """The completion with its metadata, as JSON."""
        return _completion(*await self._found(public_id, tenant))

    async def listed(self, tenant: str, wanted: Wanted) -> bytes:
        """A page, as JSON."""
        chats = [chat for chat in await self._index.of(tenant) if wanted.takes(chat)]
        chosen, more = page(chats, after=wanted.after, limit=wanted.limit, ascending=wanted.ascending)
        data = []
        for chat in chosen:
            stored = await self._store.get(chat.identity, tenant)
            if stored is not None:  # the oldest have made room
                data.append(msgspec.json.decode(_completion(chat, stored)))
        return msgspec.json.encode(shown(data, more))

    async def messages(self, public_id: str, tenant: str, wanted: Wanted) -> bytes:
        """A page of what its request said, as JSON."""
        _, stored = await self._found(public_id, tenant)
        messages = shown_messages(public_id, stored.record.messages)
        chosen, more = page(messages, after=wanted.after, limit=wanted.limit, ascending=wanted.ascending)
        return msgspec.json.encode(shown([message.shown for message in chosen], more))

    async def change(self, public_id: str, tenant: str, metadata: dict[str, str]) -> bytes:
        """Its metadata, all of them, for others."""
        chat, stored = await self._found(public_id, tenant)
        changed = await self._index.change(chat.identity, tenant, metadata)
        if changed is None:
            raise not_found(public_id)
        return _completion(changed, stored)

    async def delete(self, public_id: str, tenant: str) -> None:
        """Nothing of it is shown any more, as a generation neither."""
        chat, _ = await self._found(public_id, tenant)
        await self._store.delete(chat.identity, tenant)
        await self._index.remove(chat.identity, tenant)

    async def _found(self, public_id: str, tenant: str) -> tuple[StoredChat, StoredResponse]:
        identity = parse(public_id) if public_id.startswith(_PREFIX) else None
        if identity is None:
            raise not_found(public_id)
        await self._keeper.written(identity)
        found = await self._kept(identity, tenant)
        found = found or await self._of_journal(public_id, identity, tenant)
        if found is None or found[0].tenant != tenant:
            raise not_found(public_id)
        return found

    async def _kept(self, identity: str, tenant: str) -> tuple[StoredChat, StoredResponse] | None:
        chat = await self._index.get(identity, tenant)
        stored = None if chat is None else await self._store.get(identity, tenant)
        return None if chat is None or stored is None else (chat, stored)

    async def _of_journal(
        self, public_id: str, identity: str, tenant: str
    ) -> tuple[StoredChat, StoredResponse] | None:
        """It has ended a moment ago at another gateway, or at one that was lost: it is kept now."""
        try:
            answer = await self._answers.find(public_id, identity, tenant)
        except RouteError:
            return None
        if not (answer.ended and answer.record.is_stored_chat):
            return None
        await self._keeper.keep(answer)
        await self._keeper.written(identity)  # somebody else may be at it
        return await self._kept(identity, tenant)


def _completion(chat: StoredChat, stored: StoredResponse) -> bytes:
    whole: dict[str, Any] = msgspec.json.decode(stored.response, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(whole | {"metadata": chat.metadata})

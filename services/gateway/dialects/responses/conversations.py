"""/v1/conversations: POST; GET, POST and DELETE of one; GET and POST of its items, GET and DELETE of one of them."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openapi.operation import Operation
from services.gateway.core.errors import empty_array
from services.gateway.dialects.responses.conversation.history import History
from services.gateway.dialects.responses.conversation.items import read_input
from services.gateway.dialects.responses.routes import Include, ItemList, ItemsQuery, item_list
from services.gateway.dialects.responses.schemas import check_include
from services.gateway.intake.decoding import decode
from services.gateway.intake.schemas import Metadata
from services.gateway.persistence.budget import HistoryBudget, beside_loop
from services.gateway.persistence.items import StoredItem, encoded
from shared import limits
from shared.messages.records import ConversationEntry

PATH = "/v1/conversations"
ONE = f"{PATH}/{{conversation}}"
_operation = partial(Operation, tag="Conversations")
_Items = Annotated[list[msgspec.Raw], limits.ADDED_ITEMS.length(description="As in a response's `input`.")]


class NewConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: _Items | None = None
    metadata: Metadata | None = None


class ChangedConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: Metadata | None


class NewItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: _Items


class IncludeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include: Include = []


class StoredConversation(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct):
    """What DELETE answers."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class ConversationItem(msgspec.Struct):
    """An item as a response has it."""

    id: str
    type: str


CREATE = _operation(
    f"POST {PATH}",
    "createConversation",
    "A conversation, which responses read and add to.",
    request=NewConversation,
    needs_body=False,
    example={"items": [{"role": "user", "content": "My name is Ada."}], "metadata": {"topic": "names"}},
    response=StoredConversation,
    errors=(404, 413),
)
RETRIEVE = _operation(f"GET {ONE}", "retrieveConversation", "A conversation.", response=StoredConversation)
CHANGE = _operation(
    f"POST {ONE}",
    "updateConversation",
    "Updates the metadata of a conversation.",
    request=ChangedConversation,
    example={"metadata": {"topic": "geography"}},
    response=StoredConversation,
)
DELETE = _operation(
    f"DELETE {ONE}",
    "deleteConversation",
    "Deletes a conversation and its items; responses stay.",
    response=ConversationDeleted,
)
LIST_ITEMS = _operation(
    f"GET {ONE}/items",
    "listConversationItems",
    "The items of a conversation, page by page.",
    response=ItemList,
    query=ItemsQuery,
)
ADD_ITEMS = _operation(
    f"POST {ONE}/items",
    "createConversationItems",
    "Adds items to a conversation.",
    request=NewItems,
    example={"items": [{"role": "user", "content": "I live in Rome."}]},
    response=ItemList,
    query=IncludeQuery,
    errors=(413,),
)
ITEM = _operation(
    f"GET {ONE}/items/{{item}}",
    "retrieveConversationItem",
    "An item of a conversation.",
    response=ConversationItem,
    query=IncludeQuery,
)
DELETE_ITEM = _operation(
    f"DELETE {ONE}/items/{{item}}",
    "deleteConversationItem",
    "Deletes an item of a conversation.",
    response=StoredConversation,
)
_new = msgspec.json.Decoder(NewConversation)


def _shown(public_id: str, entry: ConversationEntry) -> dict[str, Any]:
    return {"id": public_id, "object": "conversation", "created_at": int(entry.created_at), "metadata": entry.metadata}


async def _read(ask: RequestContext, given: Sequence[msgspec.Raw]) -> list[StoredItem]:
    """The items of a request, what they refer to in its place. Raises `InvalidParameter`, `PayloadTooLarge`."""
    items = read_input(given, secrets.token_hex(16), "items")
    with ask.history_budget() as budget:
        resolved = await History(ask.parts.intake.processor.stored).resolve(items, ask.tenant, budget)
        return await beside_loop(sum(map(len, given)) + budget.items.used, encoded, resolved)


async def create(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    body = await ask.body(ask.settings.body_limit)
    given = decode(body, _new) if body.strip() else NewConversation()
    items, metadata = await _read(ask, given.items or ()), given.metadata or {}
    public_id, created_at = await ask.parts.conversations.create(ask.tenant, metadata, items)
    return _shown(public_id, ConversationEntry(created_at, metadata))


async def retrieve(ask: RequestContext) -> dict[str, Any]:
    public_id = ask.named("conversation")
    return _shown(public_id, await ask.parts.conversations.get(public_id, ask.tenant))


async def change(ask: RequestContext) -> dict[str, Any]:
    public_id = ask.named("conversation")
    metadata = (await ask.decoded(ChangedConversation, ask.settings.body_limit)).metadata or {}
    return _shown(public_id, await ask.parts.conversations.describe(public_id, ask.tenant, metadata))


async def delete(ask: RequestContext) -> ConversationDeleted:
    public_id = ask.named("conversation")
    await ask.parts.conversations.delete(public_id, ask.tenant)
    return ConversationDeleted(public_id, "conversation.deleted", True)


async def list_items(ask: RequestContext) -> dict[str, Any]:
    wanted = ask.query(ItemsQuery)
    check_include(wanted.include)
    async with _settled(ask) as budget:
        page, more = await ask.parts.conversations.page(
            ask.named("conversation"),
            ask.tenant,
            budget.items,
            after=wanted.after,
            limit=wanted.limit,
            ascending=wanted.order == "asc",
        )
        return item_list(page, more=more)


@contextlib.asynccontextmanager
async def _settled(ask: RequestContext) -> AsyncIterator[HistoryBudget]:
    """Counts the request, and adds the items of responses that have just ended; with what the request may hold."""
    history = History((await ask.counted()).processor.stored)
    with ask.history_budget() as budget:
        await history.settle(ask.named("conversation"), ask.tenant, budget)
        yield budget


async def add_items(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    check_include(ask.query(IncludeQuery).include)
    given = (await ask.decoded(NewItems, ask.settings.body_limit)).items
    if not given:
        raise empty_array("items")
    items = await _read(ask, given)
    await ask.parts.conversations.add(ask.named("conversation"), ask.tenant, items)
    return item_list(items, more=False)


async def retrieve_item(ask: RequestContext) -> msgspec.Raw:
    check_include(ask.query(IncludeQuery).include)
    async with _settled(ask):
        found = await ask.parts.conversations.item(ask.named("conversation"), ask.tenant, ask.named("item"))
        return found.json


async def delete_item(ask: RequestContext) -> dict[str, Any]:
    public_id = ask.named("conversation")
    return _shown(public_id, await ask.parts.conversations.remove(public_id, ask.tenant, ask.named("item")))


conversation_routes = routes_of(
    (CREATE, create),
    (RETRIEVE, retrieve),
    (CHANGE, change),
    (DELETE, delete),
    (LIST_ITEMS, list_items),
    (ADD_ITEMS, add_items),
    (ITEM, retrieve_item),
    (DELETE_ITEM, delete_item),
)

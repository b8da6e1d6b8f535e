"""GET of /v1/chat/completions; GET, POST and DELETE of one; GET of its messages."""

from functools import partial
from typing import Any, Literal

import msgspec

from services.gateway.api import shapes
from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openapi.operation import Operation
from services.gateway.core.errors import convert
from services.gateway.core.pagination import ListPage
from services.gateway.intake.schemas import NamedMetadata
from services.gateway.persistence.chats import ChatsQuery, MessagesQuery

PATH = "/v1/chat/completions"
ONE = PATH + "/{generation}"
_operation = partial(Operation, tag="Chat")


class ChangedChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be changed of a stored chat completion."""

    metadata: NamedMetadata | None  # in place of all that there are


class DeletedChat(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: bool


class StoredMessage(msgspec.Struct):
    """A message of the conversation that a completion goes on with."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None


class StoredMessages(ListPage):
    """A page of messages."""

    data: list[StoredMessage]


class StoredCompletions(ListPage):
    """A page of chat completions."""

    data: list[shapes.ChatCompletion]


LIST = _operation(
    f"GET {PATH}",
    "listChatCompletions",
    "The chat completions that were made with `store: true`.",
    "`metadata[key]=value`, as often as you like, leaves those that have these metadata.",
    response=StoredCompletions,
    query=ChatsQuery,
    errors=(404,),
)
RETRIEVE = _operation(
    f"GET {ONE}",
    "retrieveChatCompletion",
    "A chat completion that was made with `store: true`.",
    response=shapes.ChatCompletion,
    errors=(504,),
)
CHANGE = _operation(
    f"POST {ONE}",
    "updateChatCompletion",
    "Updates the metadata of a stored chat completion.",
    request=ChangedChat,
    example={"metadata": {"topic": "geography"}},
    response=shapes.ChatCompletion,
    errors=(504,),
)
DELETE = _operation(
    f"DELETE {ONE}", "deleteChatCompletion", "Deletes a stored chat completion.", response=DeletedChat, errors=(504,)
)
MESSAGES = _operation(
    f"GET {ONE}/messages",
    "listChatCompletionMessages",
    "The messages that a stored chat completion answers.",
    response=StoredMessages,
    query=MessagesQuery,
    errors=(504,),
)


async def list_chats(ask: RequestContext) -> bytes:
    """Those of the tenant that are stored, page by page."""
    wanted = ask.query(ChatsQuery)
    convert({"metadata": wanted.metadata}, ChangedChat)  # refuses what none has
    await ask.counted()
    with ask.history_budget() as budget:
        return await ask.parts.stored_chats.listed(ask.tenant, wanted, budget)


async def retrieve(ask: RequestContext) -> bytes:
    with ask.history_budget() as budget:
        return await ask.parts.stored_chats.get(ask.named("generation"), ask.tenant, budget)


async def change(ask: RequestContext) -> bytes:
    chats = ask.parts.stored_chats
    metadata = (await ask.decoded(ChangedChat)).metadata
    with ask.history_budget() as budget:
        return await chats.change(ask.named("generation"), ask.tenant, metadata or {}, budget)


async def delete(ask: RequestContext) -> DeletedChat:
    with ask.history_budget() as budget:
        await ask.parts.stored_chats.delete(ask.named("generation"), ask.tenant, budget)
    return DeletedChat(ask.named("generation"), "chat.completion.deleted", True)


async def list_messages(ask: RequestContext) -> bytes:
    wanted = ask.query(MessagesQuery)
    await ask.counted()
    with ask.history_budget() as budget:
        return await ask.parts.stored_chats.messages(ask.named("generation"), ask.tenant, wanted, budget)


one_chat_routes = routes_of((RETRIEVE, retrieve), (CHANGE, change), (DELETE, delete), (MESSAGES, list_messages))

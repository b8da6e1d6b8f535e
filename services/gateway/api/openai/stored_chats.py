"""GET of /v1/chat/completions; GET, POST and DELETE of one; GET of its messages."""

from typing import Any, Literal

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.api.openai import shapes
from services.gateway.api.openai.completions import CompletionsRoute
from services.gateway.api.openai.operations import CHAT
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.pagination import ListPage
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.decoding import convert, decode, read_query
from services.gateway.intake.schemas import NamedMetadata
from services.gateway.persistence.chats import ChatsQuery, MessagesQuery
from shared.service.endpoints import Receive, Scope, Send

PATH = "/v1/chat/completions"
ONE = PATH + "/{generation}"
TAG = "Chat"


class ChangedChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be changed of a stored chat completion."""

    metadata: NamedMetadata | None
    """In place of all that there are."""


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


LIST = Operation(
    f"GET {PATH}",
    "listChatCompletions",
    "The chat completions that were made with `store: true`.",
    TAG,
    "`metadata[key]=value`, as often as you like, leaves those that have these metadata.",
    response=StoredCompletions,
    query=ChatsQuery,
    errors=(404,),
)
RETRIEVE = Operation(
    f"GET {ONE}",
    "retrieveChatCompletion",
    "A chat completion that was made with `store: true`.",
    TAG,
    response=shapes.ChatCompletion,
    errors=(504,),
)
CHANGE = Operation(
    f"POST {ONE}",
    "updateChatCompletion",
    "Gives a stored chat completion other metadata.",
    TAG,
    request=ChangedChat,
    example={"metadata": {"topic": "geography"}},
    response=shapes.ChatCompletion,
    errors=(504,),
)
DELETE = Operation(
    f"DELETE {ONE}",
    "deleteChatCompletion",
    "Forgets a stored chat completion.",
    TAG,
    response=DeletedChat,
    errors=(504,),
)
MESSAGES = Operation(
    f"GET {ONE}/messages",
    "listChatCompletionMessages",
    "The messages that a stored chat completion answers.",
    TAG,
    response=StoredMessages,
    query=MessagesQuery,
    errors=(504,),
)


BODY_BYTES = 64 << 10


class ChatsRoute:
    """POST makes a chat completion; GET lists those of the tenant that are stored, page by page."""

    def __init__(self, backend: Backend, create: CompletionsRoute) -> None:
        self._backend = backend
        self._create = create

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._create(scope, receive, send)
            return
        wanted = read_query(scope["query_string"], ChatsQuery)
        convert({"metadata": wanted.metadata}, ChangedChat)  # refuses what none has
        tenant = scope["state"]["principal"].tenant
        await send_json(send, 200, await self._backend.parts.stored_chats.listed(tenant, wanted))


class ChatRoute:
    """One of them."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings
        self._decoder = msgspec.json.Decoder(ChangedChat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chats, tenant = self._backend.parts.stored_chats, scope["state"]["principal"].tenant
        public_id = scope["path_params"]["generation"]
        if scope["method"] == "DELETE":
            await chats.delete(public_id, tenant)
            gone = DeletedChat(public_id, "chat.completion.deleted", True)
            await send_json(send, 200, gone)
        elif scope["method"] == "POST":
            body = await read_body(scope, receive, BODY_BYTES, self._settings.body_timeout)
            metadata = decode(body, self._decoder).metadata
            await send_json(send, 200, await chats.change(public_id, tenant, metadata or {}))
        else:
            await send_json(send, 200, await chats.get(public_id, tenant))


class MessagesRoute(BackendRoute):
    """What one of them answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = read_query(scope["query_string"], MessagesQuery)
        tenant, public_id = scope["state"]["principal"].tenant, scope["path_params"]["generation"]
        await send_json(send, 200, await self._backend.parts.stored_chats.messages(public_id, tenant, wanted))


def chat_routes(backend: Backend, settings: GatewaySettings, create: CompletionsRoute) -> list[BaseRoute]:
    """For the application's router."""
    one = ChatRoute(backend, settings)
    return [
        ApiRoute(ChatsRoute(backend, create), CHAT, LIST),
        ApiRoute(one, RETRIEVE, CHANGE, DELETE),
        ApiRoute(MessagesRoute(backend, settings), MESSAGES),
    ]

"""GET of /v1/chat/completions; GET, POST and DELETE of one; GET of its messages."""

import re
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.api.openai import shapes
from services.gateway.api.openai.completions import CompletionsRoute
from services.gateway.api.openai.operations import CHAT
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import ApiRoute, Operation, Parameter
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.pagination import limit_of
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.decoding import convert, decode
from services.gateway.intake.schemas import NamedMetadata
from services.gateway.persistence.chats import PAGE, Wanted
from shared.service.endpoints import Receive, Scope, Send

MAX_PAGE = 100
_METADATA = re.compile(r"metadata\[([^\[\]]+)\]")


def chats_wanted(query: bytes) -> Wanted:
    """Of GET /v1/chat/completions; `metadata[key]=value` as often as one likes. Raises `InvalidParameter`."""
    params, metadata = _read(query, ("after", "limit", "order", "model"))
    convert({"metadata": metadata}, ChangedChat)
    return _wanted(params, metadata)


def messages_wanted(query: bytes) -> Wanted:
    """Of GET /v1/chat/completions/{id}/messages. Raises `InvalidParameter`."""
    params, metadata = _read(query, ("after", "limit", "order"))
    for key in metadata:
        raise _unknown(f"metadata[{key}]")
    return _wanted(params, {})


def _wanted(params: dict[str, str], metadata: dict[str, str]) -> Wanted:
    order = params.get("order", "asc")
    if order not in ("asc", "desc"):
        raise InvalidParameter(
            f"Invalid value: '{order[:64]}'. Supported values are: 'asc', 'desc'.",
            param="order",
            reason="invalid_value",
        )
    return Wanted(
        params.get("after"), limit_of(params, PAGE, MAX_PAGE), order == "asc", params.get("model"), metadata
    )


def _read(query: bytes, known: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    params: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if (entry := _METADATA.fullmatch(name)) is not None:
            metadata[entry[1]] = value
        elif name in known:
            params[name] = value
        else:
            raise _unknown(name)
    return params, metadata


def _unknown(name: str) -> InvalidParameter:
    return InvalidParameter(f"Unknown parameter: '{name[:64]}'.", param=name[:64], reason="unknown_parameter")


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


class StoredMessages(msgspec.Struct):
    """A page of messages."""

    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredCompletions(msgspec.Struct):
    """A page of chat completions."""

    object: Literal["list"]
    data: list[shapes.ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _query(name: str, description: str, schema: dict[str, Any]) -> Parameter:
    return Parameter(name, description, schema, "query")


_PAGES = (
    _query("after", "The id of the last entry that you have.", {"type": "string", "minLength": 1}),
    _query("limit", "Entries of a page.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    _query("order", "By time.", {"type": "string", "enum": ["asc", "desc"]}),
)
LIST = Operation(
    "GET",
    PATH,
    "listChatCompletions",
    "The chat completions that were made with `store: true`.",
    TAG,
    "`metadata[key]=value`, as often as you like, leaves those that have these metadata.",
    response=StoredCompletions,
    parameters=(*_PAGES, _query("model", "Of this model alone.", {"type": "string"})),
    errors=(404, 503),
)
RETRIEVE = Operation(
    "GET",
    ONE,
    "retrieveChatCompletion",
    "A chat completion that was made with `store: true`.",
    TAG,
    response=shapes.ChatCompletion,
    parameters=(operation.GENERATION,),
    errors=(404, 429, 503, 504),
)
CHANGE = Operation(
    "POST",
    ONE,
    "updateChatCompletion",
    "Gives a stored chat completion other metadata.",
    TAG,
    request=ChangedChat,
    example={"metadata": {"topic": "geography"}},
    response=shapes.ChatCompletion,
    parameters=(operation.GENERATION,),
    errors=(404, 408, 413, 429, 503, 504),
)
DELETE = Operation(
    "DELETE",
    ONE,
    "deleteChatCompletion",
    "Forgets a stored chat completion.",
    TAG,
    response=DeletedChat,
    parameters=(operation.GENERATION,),
    errors=(404, 429, 503, 504),
)
MESSAGES = Operation(
    "GET",
    ONE + "/messages",
    "listChatCompletionMessages",
    "The messages that a stored chat completion answers.",
    TAG,
    response=StoredMessages,
    parameters=(operation.GENERATION, *_PAGES),
    errors=(404, 429, 503, 504),
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
        wanted = chats_wanted(scope["query_string"])
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
        wanted = messages_wanted(scope["query_string"])
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

"""GET of /v1/chat/completions; GET, POST and DELETE of one; GET of its messages."""

import msgspec
from starlette.routing import BaseRoute

from services.gateway.backend import Backend
from services.gateway.http_io import read_body, send_json
from services.gateway.openapi.operation import ApiRoute
from services.gateway.openapi.operations import CHAT
from services.gateway.requests import validation
from services.gateway.requests.extra_fields import check_metadata
from services.gateway.rest import CompletionsRoute
from services.gateway.settings import GatewaySettings
from services.gateway.stored_chats import operations
from services.gateway.stored_chats.queries import chats_wanted, messages_wanted
from shared.service.endpoints import Receive, Scope, Send

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
        await send_json(send, 200, await self._backend.stored_chats.listed(tenant, wanted))


class ChatRoute:
    """One of them."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings
        self._decoder = msgspec.json.Decoder(operations.ChangedChat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chats, tenant = self._backend.stored_chats, scope["state"]["principal"].tenant
        public_id = scope["path_params"]["generation"]
        if scope["method"] == "DELETE":
            await chats.delete(public_id, tenant)
            gone = operations.DeletedChat(public_id, "chat.completion.deleted", True)
            await send_json(send, 200, gone)
        elif scope["method"] == "POST":
            body = await read_body(scope, receive, BODY_BYTES, self._settings.body_timeout)
            metadata = validation.decode(body, self._decoder).metadata
            check_metadata(metadata)
            await send_json(send, 200, await chats.change(public_id, tenant, metadata or {}))
        else:
            await send_json(send, 200, await chats.get(public_id, tenant))


class MessagesRoute:
    """What one of them answers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = messages_wanted(scope["query_string"])
        tenant, public_id = scope["state"]["principal"].tenant, scope["path_params"]["generation"]
        await send_json(send, 200, await self._backend.stored_chats.messages(public_id, tenant, wanted))


def chat_routes(backend: Backend, settings: GatewaySettings, create: CompletionsRoute) -> list[BaseRoute]:
    """For the application's router."""
    one = ChatRoute(backend, settings)
    return [
        ApiRoute(ChatsRoute(backend, create), CHAT, operations.LIST),
        ApiRoute(one, operations.RETRIEVE, operations.CHANGE, operations.DELETE),
        ApiRoute(MessagesRoute(backend), operations.MESSAGES),
    ]

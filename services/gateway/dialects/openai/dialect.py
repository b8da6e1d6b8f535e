"""OpenAI's chats and completions, which are what other APIs' requests are translated into."""

from collections.abc import Mapping, Sequence

from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend, route
from services.gateway.api.dialect import Dialect
from services.gateway.api.generating import CompletionsRoute
from services.gateway.api.openapi.operation import ApiRoute
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.openai import operations, rendering
from services.gateway.dialects.openai.endpoints import ChatEndpoint, CompletionEndpoint
from services.gateway.dialects.openai.stored_chats import chat_routes


def _routes(backend: Backend, settings: GatewaySettings, _: GatewayMetrics) -> Sequence[BaseRoute]:
    chat = CompletionsRoute("chat.completions", backend, settings)
    plain = CompletionsRoute("completions", backend, settings)
    return [
        route(
            backend, settings, (operations.RENDER_CHAT, rendering.render_chat)
        ),  # before the stored chats: it is no id
        *chat_routes(backend, settings, chat),
        route(backend, settings, (operations.RENDER_COMPLETION, rendering.render_completion)),
        ApiRoute(plain, operations.COMPLETIONS),
    ]


def _direct(backend: Backend, settings: GatewaySettings) -> Mapping[str, CompletionsRoute]:
    return {
        operations.CHAT.path: CompletionsRoute("chat.completions", backend, settings),
        operations.COMPLETIONS.path: CompletionsRoute("completions", backend, settings),
    }


OPENAI = Dialect(
    "openai",
    _routes,
    endpoints=(ChatEndpoint(), CompletionEndpoint()),
    absent={
        "/v1/moderations": "no model here judges texts; ask a classifier (/v1/classify), or a language model"
    },
    direct=_direct,
)

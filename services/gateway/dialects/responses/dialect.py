"""OpenAI's responses, over HTTP and on a WebSocket, and the conversations that they are turns of."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, WebSocketRoute

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.dialect import Dialect
from services.gateway.api.websocket import StreamSocket
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.responses.conversations import conversation_routes
from services.gateway.dialects.responses.endpoint import ResponsesEndpoint
from services.gateway.dialects.responses.routes import response_routes
from services.gateway.dialects.responses.socket import RESPONSES_ROUTE, ResponseConnection


def _routes(backend: GatewayBackend, settings: GatewaySettings, metrics: GatewayMetrics) -> Sequence[BaseRoute]:
    return [
        *response_routes(backend, settings),
        *conversation_routes(backend, settings),
        WebSocketRoute(RESPONSES_ROUTE, StreamSocket(backend, settings, metrics, ResponseConnection)),
    ]


RESPONSES = Dialect("responses", _routes, endpoints=(ResponsesEndpoint(),), error_event=b"error")

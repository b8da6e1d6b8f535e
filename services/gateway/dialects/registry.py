"""The list of what this gateway speaks: a line each, in the order of its routes and of /openapi.json."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, WebSocketRoute

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.dialect import Dialect, routes_of
from services.gateway.api.generations import generation_routes
from services.gateway.api.models.adapters import adapter_routes
from services.gateway.api.models.registry import registry_routes
from services.gateway.api.models.routes import model_routes
from services.gateway.api.openai.files import file_routes
from services.gateway.api.openai.uploads import upload_routes
from services.gateway.api.sessions import session_routes
from services.gateway.api.websocket import ROUTE, StreamSocket
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.anthropic.dialect import ANTHROPIC
from services.gateway.dialects.cohere import COHERE
from services.gateway.dialects.ollama.dialect import OLLAMA
from services.gateway.dialects.openai.dialect import OPENAI
from services.gateway.dialects.pooling.dialect import POOLING
from services.gateway.dialects.responses.dialect import RESPONSES
from services.gateway.dialects.vllm import VLLM


def _sockets(backend: GatewayBackend, settings: GatewaySettings, metrics: GatewayMetrics) -> Sequence[BaseRoute]:
    return [WebSocketRoute(ROUTE, StreamSocket(backend, settings, metrics))]


DIALECTS = (
    OPENAI,
    POOLING,
    VLLM,
    Dialect("models", routes_of(model_routes, registry_routes, adapter_routes)),
    Dialect("generations", routes_of(generation_routes)),
    Dialect("websocket", _sockets),
    RESPONSES,
    Dialect("sessions", routes_of(session_routes)),
    Dialect("files", routes_of(file_routes, upload_routes)),
    ANTHROPIC,
    OLLAMA,
    COHERE,
)

"""The list of what this gateway speaks: a line each, in the order of its routes and of /openapi.json."""

from services.gateway.api.dialect import Dialect
from services.gateway.api.generations import generation_routes
from services.gateway.api.models.adapters import adapter_routes
from services.gateway.api.models.registry import registry_routes
from services.gateway.api.models.routes import model_routes
from services.gateway.api.openai.files import file_routes
from services.gateway.api.openai.uploads import upload_routes
from services.gateway.api.sessions import session_routes
from services.gateway.api.websocket import ROUTE, WebSocketSession, socket_routes
from services.gateway.dialects.anthropic.dialect import ANTHROPIC
from services.gateway.dialects.cohere import COHERE
from services.gateway.dialects.ollama.dialect import OLLAMA
from services.gateway.dialects.openai.dialect import OPENAI
from services.gateway.dialects.pooling.dialect import POOLING
from services.gateway.dialects.responses.dialect import RESPONSES
from services.gateway.dialects.vllm import VLLM

DIALECTS = (
    OPENAI,
    POOLING,
    VLLM,
    Dialect("models", (model_routes, registry_routes, adapter_routes)),
    Dialect("generations", (generation_routes,)),
    Dialect("websocket", (socket_routes(ROUTE, WebSocketSession),)),
    RESPONSES,
    Dialect("sessions", (session_routes,)),
    Dialect("files", (file_routes, upload_routes)),
    ANTHROPIC,
    OLLAMA,
    COHERE,
)

"""Ollama's API: lines of JSON in place of events, models by the names that they have there."""

from collections.abc import Mapping
from typing import Any

from services.gateway.api.backend import Backend
from services.gateway.api.dialect import Dialect, routes_of
from services.gateway.core.asgi import LineStream
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.ollama.generating import answer_routes, generating_routes
from services.gateway.dialects.ollama.intake import ChatEndpoint, GenerateEndpoint
from services.gateway.dialects.ollama.models import ollama_model_routes
from services.gateway.dialects.ollama.shapes import described


def _direct(backend: Backend, settings: GatewaySettings) -> Mapping[str, Any]:
    return {one.path: one.app for one in answer_routes(backend, settings)}


OLLAMA = Dialect(
    "ollama",
    routes_of(generating_routes, ollama_model_routes),
    endpoints=(ChatEndpoint(), GenerateEndpoint()),
    describe=described,
    stream=LineStream,
    done=False,
    paths=("/api/",),
    direct=_direct,
)

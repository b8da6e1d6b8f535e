"""Ollama's API: lines of JSON in place of events, models by the names that they have there."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend
from services.gateway.api.dialect import Dialect
from services.gateway.core.asgi import LineStream
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.ollama.generating import answer_routes, generating_routes
from services.gateway.dialects.ollama.intake import ChatEndpoint, GenerateEndpoint
from services.gateway.dialects.ollama.models import ollama_model_routes
from services.gateway.dialects.ollama.shapes import described


def _routes(backend: Backend, settings: GatewaySettings, _: GatewayMetrics) -> Sequence[BaseRoute]:
    return [*generating_routes(backend, settings), *ollama_model_routes(backend, settings)]


def _direct(backend: Backend, settings: GatewaySettings) -> Mapping[str, Any]:
    return {one.path: one.app for one in answer_routes(backend, settings)}


OLLAMA = Dialect(
    "ollama",
    _routes,
    endpoints=(ChatEndpoint(), GenerateEndpoint()),
    describe=described,
    stream=LineStream,
    done=False,
    paths=("/api/",),
    direct=_direct,
)

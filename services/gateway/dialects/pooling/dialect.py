"""Embeddings as OpenAI has them, ranks as Jina and Cohere, scores, classes and pooling as vLLM."""

from collections.abc import Sequence

from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend
from services.gateway.api.dialect import Dialect
from services.gateway.api.generating import CompletionsRoute
from services.gateway.api.openapi.operation import ApiRoute
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.openai.operations import EMBEDDINGS
from services.gateway.dialects.pooling.endpoints import ENDPOINTS
from services.gateway.dialects.pooling.routes import scoring_routes


def _routes(backend: Backend, settings: GatewaySettings, _: GatewayMetrics) -> Sequence[BaseRoute]:
    return [
        ApiRoute(CompletionsRoute("embeddings", backend, settings), EMBEDDINGS),
        *scoring_routes(backend, settings),
    ]


POOLING = Dialect("pooling", _routes, endpoints=ENDPOINTS)

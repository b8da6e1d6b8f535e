"""What vLLM has beside OpenAI's API: tokens, and one path for all bodies."""

from collections.abc import Sequence

from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend, route
from services.gateway.api.dialect import Dialect
from services.gateway.api.generating import CompletionsRoute
from services.gateway.api.openapi.operation import ApiRoute
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.openai import operations
from services.gateway.dialects.vllm import tokens as vllm


def _routes(backend: Backend, settings: GatewaySettings, _: GatewayMetrics) -> Sequence[BaseRoute]:
    return [
        ApiRoute(CompletionsRoute("invocations", backend, settings), operations.INVOCATIONS),
        *(route(backend, settings, (item, vllm.tokenize)) for item in operations.TOKENIZE),
        *(route(backend, settings, (item, vllm.detokenize)) for item in operations.DETOKENIZE),
        *(route(backend, settings, (item, vllm.tokenizer_info)) for item in operations.TOKENIZER_INFO),
    ]


VLLM = Dialect("vllm", _routes)

"""What vLLM has beside OpenAI's API: tokens, and one path for all bodies."""

from services.gateway.api import shapes
from services.gateway.api.backend import Backend
from services.gateway.api.dialect import Dialect, routes_of
from services.gateway.api.generating import CompletionsRoute
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, ApiRoute, Operation
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.vllm.tokens import token_routes
from services.gateway.intake.schemas import ChatCompletionRequest

INVOCATIONS = Operation(
    "POST /invocations",
    "invoke",
    "Dispatches by the fields of the body, as in SageMaker and vLLM.",
    "Chat",
    "`messages`: a chat; `prompt`: a completion; `query`: a reranking; `queries` or `text_1`: scores; `input`: "
    "embeddings. Each as at its own path.",
    request=ChatCompletionRequest,
    example={
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "max_tokens": 32,
    },
    response=shapes.ChatCompletion,
    events=(shapes.ChatCompletionChunk,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)


def _invocations(backend: Backend, settings: GatewaySettings) -> list[ApiRoute]:
    return [ApiRoute(CompletionsRoute("invocations", backend, settings), INVOCATIONS)]


VLLM = Dialect("vllm", routes_of(_invocations, token_routes))

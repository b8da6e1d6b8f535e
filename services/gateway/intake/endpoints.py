"""What clients ask a gateway's models for: the endpoints, and the requests that they decode to."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.gateway.core.errors import RouteError, missing
from services.gateway.intake import embeddings, rules
from services.gateway.intake.decoding import decode
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.scoring.schemas import ClassifyRequest, RerankRequest, ScoreRequest, pairs_of

Pooled = embeddings.EmbeddingRequest | ClassifyRequest | RerankRequest | ScoreRequest
"""What asks for vectors, or for what is made of them."""
Decoded = ChatCompletionRequest | CompletionRequest | Pooled
Endpoint = Literal[
    "chat.completions",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "rerank",
    "score",
    "classify",
    "pooling",
    "invocations",
]
_INVOKED: Mapping[str, Endpoint] = {
    "messages": "chat.completions",
    "prompt": "completions",
    "query": "rerank",
    "queries": "score",
    "text_1": "score",
    "input": "embeddings",
}
"""What a body of /invocations is for, by the first of these fields that it has."""


POOLED = frozenset(("embeddings", "rerank", "score", "classify", "pooling"))
"""Endpoints whose answers have no text."""


def invoked(body: bytes | msgspec.Raw) -> Endpoint:
    """Raises `InvalidParameter`."""
    fields = decode(body, _fields)
    for name, endpoint in _INVOKED.items():
        if name in fields:
            return endpoint
    raise missing("messages", "the body of a chat, or another with one of: " + ", ".join(_INVOKED))


def is_response(body: bytes) -> bool:
    """Whether it is a response's and not a chat's. Raises `InvalidParameter`."""
    return "input" in decode(body, _fields)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_pooled(request: Pooled) -> None:
    """As far as that needs no model. Raises `InvalidParameter`."""
    if isinstance(request, (RerankRequest, ScoreRequest)):
        pairs_of(request)
        return
    if isinstance(request, ClassifyRequest):
        request = embeddings.EmbeddingRequest(model=request.model, input=request.input)
    embeddings.inputs_of(request)


def streamed(request: Decoded) -> Decoded:
    """`request` with `stream` set. Raises `RouteError`, and `InvalidParameter` when it says no to that."""
    if isinstance(request, Pooled):
        raise RouteError(
            "Embeddings and scores are not streamed; POST them to /v1/embeddings, /v1/rerank, /v1/score or "
            "/v1/classify.",
            status=400,
            reason="unsupported_parameter",
        )
    return rules.streamed(request)

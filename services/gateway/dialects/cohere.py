"""What Cohere's clients are told: of its API only /v2/rerank is here, which `dialects/pooling` serves."""

from services.gateway.api.dialect import Dialect
from services.gateway.core.errors import describe

_ABSENT = {
    "/v2/chat": "of Cohere's API only /v2/rerank is; send chats to /v1/chat/completions",
    "/v2/embed": "of Cohere's API only /v2/rerank is; send texts to /v1/embeddings",
}


def _described(error: BaseException, request_id: str) -> dict[str, str]:
    return {"id": request_id, "message": describe(error, request_id).error.message}


COHERE = Dialect("cohere", describe=_described, paths=tuple(_ABSENT), absent=_ABSENT)

"""POST /pooling, vLLM's: what a model makes of an input, whether that is a vector or the probabilities of classes."""

from typing import Annotated, Any, Literal

from services.gateway.core.errors import unsupported
from services.gateway.intake.embeddings import EmbeddingRequest
from services.gateway.intake.rules import check_neutral
from services.gateway.intake.schemas import neutral
from services.gateway.intake.scoring.schemas import ClassifyRequest
from shared.messages import ModelCard

OF_VECTORS = (
    "messages",
    "add_generation_prompt",
    "chat_template_kwargs",
    "dimensions",
    "prompt_name",
    "truncation_side",
)


class PoolingRequest(EmbeddingRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    task: Literal["embed", "classify"] | None = None
    """Left out: what the model does."""
    use_activation: Annotated[Any, neutral(True, why="/v1/classify shows logits")] = None


def classes_wanted(request: PoolingRequest, card: ModelCard) -> ClassifyRequest | None:
    """As what `request` is served; None: vectors are wanted. Raises `InvalidParameter`."""
    check_neutral(request)
    alone = card.does("classify") and not card.does("embed")
    if (request.task or ("classify" if alone else "embed")) == "embed":
        return None
    for name in OF_VECTORS:
        if getattr(request, name) is not None:
            raise unsupported(name, f"{card.model} gives the probabilities of classes; leave it out")
    return ClassifyRequest(
        model=request.model,
        input=request.input or "",
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        user=request.user,
    )

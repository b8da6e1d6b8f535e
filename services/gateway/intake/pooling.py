"""POST /pooling, vLLM's: what a model makes of an input, whether that is a vector or the probabilities of classes."""

from typing import Literal

from services.gateway.core.errors import unsupported
from services.gateway.intake.embeddings import EmbeddingRequest
from services.gateway.intake.scoring.schemas import ClassifyRequest
from shared.messages import ModelCard

_OF_VECTORS = (
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
    use_activation: bool | None = None
    """Of classes: false shows their logits as they are."""


def classes_wanted(request: PoolingRequest, card: ModelCard) -> ClassifyRequest | None:
    """As whose `request` is served; None: vectors are wanted. Raises `InvalidParameter`."""
    task = request.task or ("embed" if card.does("embed") else "classify")
    if task == "embed":
        if request.use_activation is False:
            raise unsupported("use_activation", "vectors are as long as the model's files say; leave it out")
        return None
    for name in _OF_VECTORS:
        if getattr(request, name) is not None:
            raise unsupported(name, f"{card.model} gives the probabilities of classes; leave it out")
    return ClassifyRequest(
        model=request.model,
        input=request.input or "",
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        use_activation=request.use_activation,
        user=request.user,
    )

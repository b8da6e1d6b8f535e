"""From a rerank, score or classify request to its record: each prompt a generation without output, whose one entry
has the vector that its score is made of."""

from typing import Any

from services.gateway.dialects.pooling.prompts import Prompts, class_prompts, score_prompts
from services.gateway.dialects.pooling.schemas import (
    ClassifyRequest,
    RerankRequest,
    ScoringRequest,
    check_lengths,
    pairs_of,
)
from services.gateway.intake.prompts.embeddings import pooled_record
from services.gateway.intake.record import Context, RunDependencies
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import ModelCard
from shared.messages.records import GenerationRecord, Scoring


async def scoring_record(
    request: ScoringRequest, card: ModelCard, tokenizer: Tokenizer, context: Context, parts: RunDependencies
) -> GenerationRecord:
    """Raises `InvalidParameter`, `ContextLengthExceeded`, `PayloadTooLarge`, `QueueFull`."""
    check_lengths(request, card)
    made, scoring, texts = await _prompts(request, card, tokenizer, parts.settings.prompt_limit)
    of_way: dict[str, dict[str, Any]] = {
        "classes": {"classify": True},
        "answers": {"logprob_token_ids": list(made.answers)},
        "vectors": {"embed": True},
    }
    fields = {"priority": request.priority or 0, **of_way[made.way]}
    wanted = [{"prompt": prompt.tokens, "second_segment": prompt.second_segment, **fields} for prompt in made.prompts]
    shown = {"user": request.user or "", "scoring": scoring, "texts": texts}
    return pooled_record(_endpoint(request), wanted, card, context, parts, **shown)


async def _prompts(
    request: ScoringRequest, card: ModelCard, tokenizer: Tokenizer, limit: int
) -> tuple[Prompts, Scoring, list[str]]:
    """And how they become scores, and what is shown with each prompt's."""
    if isinstance(request, ClassifyRequest):
        made = await class_prompts(request, tokenizer, card, limit)
        return made, Scoring("classes", _activation(request, card), card.labels), []
    pairs = pairs_of(request)
    made = await score_prompts(request, pairs, tokenizer, card, limit)
    queries = len(pairs.queries) if made.way == "vectors" else 0
    scoring = Scoring(
        made.way,
        _activation(request, card) if made.way == "classes" else "",
        queries=queries,
        top_n=(request.top_n or 0) if isinstance(request, RerankRequest) else 0,
    )
    shown = isinstance(request, RerankRequest) and request.return_documents is not False
    return made, scoring, [""] * queries + pairs.documents if shown else []


def _activation(request: ScoringRequest, card: ModelCard) -> str:
    return "identity" if request.use_activation is False else card.activation


def _endpoint(request: ScoringRequest) -> str:
    if isinstance(request, RerankRequest):
        return "rerank"
    return "classify" if isinstance(request, ClassifyRequest) else "score"

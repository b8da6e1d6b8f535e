"""From a rerank, score or classify request to its record: each prompt a generation without output, whose one entry
has the vector that its score is made of."""

from collections.abc import Sequence
from typing import Any

from services.gateway.dialects.pooling.prompts import Prompts, class_prompts, score_prompts
from services.gateway.dialects.pooling.schemas import (
    ClassifyRequest,
    Pairs,
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
    limit = parts.settings.prompt_limit
    check_lengths(request, card)
    if isinstance(request, ClassifyRequest):
        made = await class_prompts(request, tokenizer, card, limit)
        scoring = Scoring("classes", _activation(request, card), card.labels)
        return _record(request, made, scoring, [], card, context, parts)
    pairs = pairs_of(request)
    made = await score_prompts(request, pairs, tokenizer, card, limit)
    queries = len(pairs.queries) if made.way == "vectors" else 0
    scoring = Scoring(
        made.way,
        _activation(request, card) if made.way == "classes" else "",
        queries=queries,
        top_n=(request.top_n or 0) if isinstance(request, RerankRequest) else 0,
    )
    return _record(request, made, scoring, _shown(request, pairs, queries), card, context, parts)


def _activation(request: ScoringRequest, card: ModelCard) -> str:
    return "identity" if request.use_activation is False else card.activation


def _shown(request: ScoringRequest, pairs: Pairs, queries: int) -> list[str]:
    """What is shown with each prompt's score."""
    if not isinstance(request, RerankRequest) or request.return_documents is False:
        return []
    return [""] * queries + pairs.documents


def _record(
    request: ScoringRequest,
    made: Prompts,
    scoring: Scoring,
    texts: Sequence[str],
    card: ModelCard,
    context: Context,
    parts: RunDependencies,
) -> GenerationRecord:
    of_way: dict[str, dict[str, Any]] = {
        "classes": {"classify": True},
        "answers": {"logprob_token_ids": list(made.answers)},
        "vectors": {"embed": True},
    }
    fields = {"priority": request.priority or 0, **of_way[made.way]}
    wanted = [{"prompt": prompt.tokens, "second_segment": prompt.second_segment, **fields} for prompt in made.prompts]
    shown = {"user": request.user or "", "scoring": scoring, "texts": list(texts)}
    return pooled_record(_endpoint(request), wanted, card, context, parts, **shown)


def _endpoint(request: ScoringRequest) -> str:
    if isinstance(request, RerankRequest):
        return "rerank"
    return "classify" if isinstance(request, ClassifyRequest) else "score"

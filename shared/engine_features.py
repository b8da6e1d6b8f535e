"""What of a request an engine that schedules for itself may be unable to do (docs/engines.md), and the sentence that
refuses it: the same at its group's leader and at gateways, which have the engine's traits by the model's card. Pure.
"""

from collections.abc import Collection

from shared.errors import InvalidRequest
from shared.messages import EngineTraits, GenerationRequest

# What no such engine is asked for so far.
OF_RINGS = ("logprob_token_ids", "sparse")
# By name, what a client is told that it asked for.
FEATURES = {
    "pooling": "embeddings and classification",
    "second_segment": "reranking by a model that tells two texts apart",
    "logprob_token_ids": "reranking by a language model's yes or no",
    "adapter": "LoRA adapters",
    "sparse": "sparse attention",
    "grammar": "structured output",
    "penalties": "penalties",
    "logit_bias": "logit_bias",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "min_tokens": "min_tokens",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "cache_salt": "cache_salt",
}


def refusal_of(request: GenerationRequest, engine: EngineTraits) -> InvalidRequest | None:
    """Whether the request asks for something that the engine cannot do."""
    return refusal(asks_for(request), engine) if engine.unsupported else None


def refusal(features: Collection[str], engine: EngineTraits) -> InvalidRequest | None:
    """Of those of `features` that the engine cannot do."""
    asked = [FEATURES[name] for name in features if name in engine.unsupported]
    if not asked:
        return None
    return InvalidRequest(f"{engine.name}, which computes this model, does not support {', '.join(asked)}.")


def asks_for(request: GenerationRequest) -> list[str]:
    """Names of `FEATURES` that the request needs."""
    sampling = request.sampling
    needs = {
        "pooling": request.embed or request.classify,
        "second_segment": request.second_segment > 0,
        "logprob_token_ids": bool(request.logprob_token_ids),
        "adapter": bool(request.adapter),
        "sparse": request.sparse is not None,
        "grammar": request.grammar is not None,
        "penalties": bool(sampling.presence_penalty or sampling.frequency_penalty)
        or sampling.repetition_penalty != 1.0,
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "min_tokens": sampling.min_tokens > 0,
        "logprobs": sampling.logprobs >= 0,
        "prompt_logprobs": request.prompt_logprobs >= 0,
        "cache_salt": bool(request.cache_salt),
    }
    return [name for name, needed in needs.items() if needed]

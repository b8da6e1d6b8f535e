"""From a request's fields and a model's defaults to what a ring needs to choose tokens."""

import secrets
from collections.abc import Sequence
from typing import Any

from services.gateway.core.errors import InvalidField, unsupported
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest, ContentPart, GenerationFields
from services.gateway.lifecycle.request_state import UINT64
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared import limits
from shared.errors import ContextLengthExceeded
from shared.limits import PREDICTION
from shared.messages import ModelCard, SamplingParams

# What is not under the same name in a request, or is something else there.
_OTHERS = ("seed", "logprobs", "bad_words")
_NAMES = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationFields.__struct_fields__ and name not in _OTHERS
)


def sampling_params(
    request: GenerationFields,
    card: ModelCard,
    *,
    bad_words: list[list[int]] = [],  # noqa: B006
    best: bool = False,
) -> SamplingParams:
    """Given fields, else the model's defaults, else what does nothing. `bad_words`: in tokens; `best`: whether the best
    of more candidates are shown. Raises `InvalidParameter`.

    Without a seed in the request one is drawn, so that a continuation elsewhere draws the same tokens.
    """
    chosen: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(request, name)
        if value is None:
            value = card.defaults.get(name)
        if value is not None:
            chosen[name] = value
    if request.logit_bias:
        check_token_ids("logit_bias", list(request.logit_bias), card.vocab_size)
    if request.allowed_token_ids:
        _check_allowed(request, request.allowed_token_ids, card)
    if "top_k" in chosen:
        chosen["top_k"] = max(0, int(chosen["top_k"]))
    logprobs = _logprobs(request)
    return SamplingParams(
        **chosen,
        seed=secrets.randbits(64) if request.seed is None else request.seed & UINT64,
        logprobs=max(0, logprobs) if best else logprobs,
        bad_words=bad_words,
    )


def _check_allowed(request: GenerationFields, allowed: list[int], card: ModelCard) -> None:
    check_token_ids("allowed_token_ids", allowed, card.vocab_size)
    if request.min_tokens and not set(allowed) - set(stop_token_ids(request, card)):
        raise InvalidField(
            "allowed_token_ids",
            "all of them end the text, which min_tokens forbids; allow others too, or leave min_tokens out.",
        )


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidParameter` when one of `ids` is no token of the model."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidField(
            name,
            f"the token id {wrong} is not within 0 and {vocab_size - 1}, the vocabulary of the model.",
            reason="invalid_token_id",
        )


def stop_token_ids(request: GenerationFields, card: ModelCard) -> list[int]:
    """Tokens that end the generation. Raises `InvalidParameter`."""
    given = request.stop_token_ids or []
    if given:
        check_token_ids("stop_token_ids", given, card.vocab_size)
    return given if request.ignore_eos else [*card.eos_token_ids, *given]


def told_stop_ids(request: GenerationFields, card: ModelCard) -> list[int]:
    """Those of the client's stop token ids that are a stop reason where they end a text: not the model's own."""
    own = () if request.ignore_eos else card.eos_token_ids
    return [token for token in request.stop_token_ids or () if token not in own]


def _logprobs(request: GenerationFields) -> int:
    if isinstance(request, ChatCompletionRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    if isinstance(request, CompletionRequest) and request.logprobs is not None:
        return request.logprobs
    return -1


def prompt_logprobs(request: GenerationFields) -> int:
    """How many of the most likely tokens are wanted beside each token of the prompt; -1: nothing is said of them."""
    wanted = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    echoed = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    return max(wanted, _logprobs(request)) if echoed else wanted


async def bad_words(request: GenerationFields, tokenizer: Tokenizer) -> list[list[int]]:
    """The words of `request` in tokens, each in every way to say it. Raises `InvalidParameter`."""
    if not request.bad_words:
        return []
    given = [word.lstrip() for word in request.bad_words]
    both = [way for word in given for way in (word, f" {word}")]
    encoded = await tokenizer.encode_all(both, special=False)
    words = [way for pair in zip(encoded[::2], encoded[1::2], strict=True) for way in _ways_to_say(*pair)]
    if (longest := max(map(len, words), default=0)) > limits.BAD_WORD_TOKENS.value:
        wrong = f"a word has {longest} tokens; send shorter ones ({limits.BAD_WORD_TOKENS.cited()})."
        raise InvalidField("bad_words", wrong, reason="string_above_max_length")
    return words


def _ways_to_say(plain: list[int], spaced: list[int]) -> list[list[int]]:
    """The tokens of a word at the beginning of a text, and after a space where these are as many others."""
    differs = len(spaced) == len(plain) and spaced[:1] != plain[:1]
    return [tokens for tokens in ([plain, spaced] if differs else [plain]) if tokens]


# --- what the answer is expected to be ------------------------------------------------------------


async def predicted(request: GenerationFields, card: ModelCard, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the answer that `request` expects. Raises `InvalidParameter`, `ContextLengthExceeded`."""
    if not isinstance(request, ChatCompletionRequest) or request.prediction is None:
        return []
    text = _predicted_text(request.prediction.content)
    _check_prediction(tokenizer.fewest_tokens(text), card)  # by its size, before it is tokenized
    prediction = await tokenizer.encode(text, special=False)
    _check_prediction(len(prediction), card)
    return prediction


def _check_prediction(tokens: int, card: ModelCard) -> None:
    """An answer has no more tokens than the context, and nothing is expected behind its end."""
    if tokens > card.context_length:
        raise ContextLengthExceeded(
            f"Invalid 'prediction': it has {tokens} tokens or more, more than any answer can have; shorten it "
            f"({PREDICTION.cited(card.context_length)}).",
            param="prediction",
        )


def _predicted_text(content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise unsupported(f"prediction.content[{index}].{part.type[:64]}", "send text")
    return "".join(part.text or "" for part in content)

"""Request fields beside those that say what is generated, turned into what honours them.

| field | honoured by |
| --- | --- |
| best_of, n | as many choices as candidates; `formats.EchoFormat` shows the best of them |
| echo, include_stop_str_in_output, stream_options | what the record says of how the text is shown |
| service_tier | the lane |
| prediction | drafts in the ring |
| prompt_cache_options, prompt_cache_retention, a part's prompt_cache_breakpoint | the ring's pins of KV blocks |
| priority, cache_salt | the scheduler's queue, the ring's prefix cache |
| sparse_attention | the ring: which earlier tokens a token reads |
| min_tokens, allowed_token_ids, bad_words | what the ring's sampler may draw |
| verbosity, add_generation_prompt, continue_final_message | the chat template |
| store, metadata, user, safety_identifier | the record |

Fields that change nothing here: ignored, and named to the client; or refused, where the settings say so.
"""

from typing import Any

import msgspec

from services.gateway.core.errors import InvalidParameter, asks_for_nothing, unsupported
from services.gateway.intake import sampling
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    SparseAttentionField,
    SparseAttentionOptions,
    are_texts,
    marked,
)
from services.gateway.intake.validation import check_neutral, check_token_ids
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared import limits
from shared.errors import ContextLengthExceeded
from shared.messages import Lane, ModelCard, SamplingParams, SparseAttention
from shared.messages.records import RecordedEndpoint
from shared.sparse_attention import FIELDS, WrongChoice, check


class Extras(msgspec.Struct, frozen=True):
    """What fields of a request are in tokens."""

    bad_words: list[list[int]] = []
    prediction: list[int] = []


NO_EXTRAS = Extras()

# --- what the tokenizer says of them -------------------------------------------------------------


async def extras_of(request: GenerationFields, card: ModelCard, tokenizer: Tokenizer) -> Extras:
    """The fields of `request` that are texts for the ring, as its tokens. Raises `InvalidParameter`,
    `ContextLengthExceeded`."""
    words = await _bad_words(request, tokenizer) if request.bad_words else []
    if words and (longest := max(map(len, words), default=0)) > limits.BAD_WORD_TOKENS.value:
        raise InvalidParameter(
            f"Invalid 'bad_words': a word has {longest} tokens; send shorter ones "
            f"({limits.BAD_WORD_TOKENS.cited()}).",
            param="bad_words",
            reason="string_above_max_length",
        )
    if not isinstance(request, ChatCompletionRequest) or request.prediction is None:
        return Extras(words) if words else NO_EXTRAS
    text = _text(request.prediction.content)
    _check_prediction(tokenizer.fewest_tokens(text), card)  # by its size, before it is tokenized
    prediction = await tokenizer.encode(text, special=False)
    _check_prediction(len(prediction), card)
    return Extras(words, prediction)


def _check_prediction(tokens: int, card: ModelCard) -> None:
    """An answer has no more tokens than the context, and nothing is expected behind its end."""
    if tokens > card.context_length:
        raise ContextLengthExceeded(
            f"Invalid 'prediction': it has {tokens} tokens or more, more than any answer can have; shorten it "
            f"({limits.PREDICTION.cited(card.context_length)}).",
            param="prediction",
        )


async def _bad_words(request: GenerationFields, tokenizer: Tokenizer) -> list[list[int]]:
    given = [word.lstrip() for word in request.bad_words or ()]
    both = [way for word in given for way in (word, f" {word}")]
    encoded = await tokenizer.encode_all(both, special=False) if both else []
    return [way for pair in zip(encoded[::2], encoded[1::2], strict=True) for way in _ways_to_say(*pair)]


def _ways_to_say(plain: list[int], spaced: list[int]) -> list[list[int]]:
    """The tokens of a word at the beginning of a text, and after a space where these are as many others."""
    differs = len(spaced) == len(plain) and spaced[:1] != plain[:1]
    return [tokens for tokens in ([plain, spaced] if differs else [plain]) if tokens]


def _text(content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise unsupported(f"prediction.content[{index}].{part.type[:64]}", "send text")
    return "".join(part.text or "" for part in content)


def truncated(request: GenerationFields, card: ModelCard, prompt: list[int]) -> list[int]:
    """The end of `prompt` that `truncate_prompt_tokens` leaves. Raises `ContextLengthExceeded`."""
    count = request.truncate_prompt_tokens
    assert count is not None, "it is asked for"
    if count > card.context_length:
        raise ContextLengthExceeded(
            f"truncate_prompt_tokens is {count} and this model's maximum context length is {card.context_length} "
            "tokens; ask for fewer.",
            param="truncate_prompt_tokens",
        )
    if count < 0:
        chat_limit = getattr(request, "max_completion_tokens", None)
        count = max(1, card.context_length - (chat_limit or request.max_tokens or 1))
    return prompt[:count] if request.truncation_side == "right" else prompt[-count:]


# --- what becomes of them ------------------------------------------------------------------------


def candidates(request: GenerationFields) -> int:
    """Choices that are generated of each prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return best_of or request.n or 1


def lane_of(request: GenerationFields, given: Lane) -> Lane:
    """The lane of the tier that was asked for; a caller that is in no hurry stays so."""
    return "batch" if request.service_tier == "flex" else given


def notes_of(
    request: GenerationFields, card: ModelCard, endpoint: RecordedEndpoint, lane: Lane, *, best: bool
) -> dict[str, Any]:
    """The fields of the record that are about how the answer to `request` is shown. `lane`: of its generations; `best`:
    whether the best of more candidates are shown."""
    options = request.stream_options
    notes: dict[str, Any] = {
        "best": (request.n or 1) if best else 0,
        "hide_logprobs": best and getattr(request, "logprobs", None) is None,
        "echo": bool(getattr(request, "echo", None)),
        "include_stop": bool(request.include_stop_str_in_output),
        "continues": bool(getattr(request, "continue_final_message", None))
        or (isinstance(request, CompletionRequest) and endpoint != "completions"),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "obfuscate": bool(options and options.include_obfuscation),
        "fingerprint": card.fingerprint,
        "service_tier": _tier(lane) if request.service_tier is not None else "",
        "store": bool(request.store),
        "metadata": request.metadata or {},
        "user": request.safety_identifier or request.user or "",
        "tokens_as_ids": bool(request.return_tokens_as_token_ids),
        "token_ids": bool(request.return_token_ids),
        "stop_token_ids": sampling.told_stop_ids(request, card) if request.stop_token_ids else [],
        "prompt_logprobs": -1 if request.prompt_logprobs is None else request.prompt_logprobs,
    }
    if request.store and isinstance(request, ChatCompletionRequest):
        notes["messages"] = msgspec.json.encode(request.messages)
    return notes


def _tier(lane: Lane) -> str:
    """What OpenAI's API calls the lane, of a request that asks for a tier."""
    return "flex" if lane == "batch" else "default"


def with_chosen(
    params: SamplingParams,
    request: GenerationFields,
    card: ModelCard,
    extras: Extras,
    stops: list[int],
    *,
    best: bool,
) -> SamplingParams:
    """`params` with what else `request` says of how its tokens are chosen. `stops`: tokens that end the text; `best`:
    as of `notes_of`. Raises `InvalidParameter`."""
    allowed = request.allowed_token_ids or []
    if allowed:
        check_token_ids("allowed_token_ids", allowed, card.vocab_size)
    min_tokens = request.min_tokens or 0
    if min_tokens and allowed and not set(allowed) - set(stops):
        raise InvalidParameter(
            "Invalid 'allowed_token_ids': all of them end the text, which min_tokens forbids; allow others too, or "
            "leave min_tokens out.",
            param="allowed_token_ids",
            reason="invalid_value",
        )
    changes: dict[str, Any] = {}
    if min_tokens or allowed or extras.bad_words:
        changes |= {"min_tokens": min_tokens, "allowed_token_ids": allowed, "bad_words": extras.bad_words}
    if best:
        changes["logprobs"] = max(0, params.logprobs)
    return msgspec.structs.replace(params, **changes) if changes else params


def sparse_of(
    given: SparseAttentionField | None, usual: SparseAttention | None, card: ModelCard, *, unasked: bool
) -> SparseAttention | None:
    """Which earlier tokens the request's tokens read; None: all. `usual`: as the model's entry says; `unasked`: whether
    that holds for requests that say nothing. Raises `InvalidParameter`."""
    if given is None:
        return usual if unasked else None
    if given is False:
        return None
    choice = usual or SparseAttention()
    if isinstance(given, SparseAttentionOptions):
        fields = {name: value for name in FIELDS if (value := getattr(given, name)) is not None}
        choice = msgspec.structs.replace(choice, **fields)
    try:
        check(choice, card.page_tokens)
    except WrongChoice as error:
        name = f"sparse_attention.{error.field}"
        raise InvalidParameter(f"Invalid '{name}': {error}.", param=name, reason="invalid_value") from None
    if choice.kind in card.sparse:
        return choice
    raise unsupported("sparse_attention", _why_not(choice, card))


def _why_not(choice: SparseAttention, card: ModelCard) -> str:
    if "window" not in card.sparse:
        return (
            f"{card.model} cannot: none of its layers attends to all earlier tokens, or its groups are of an earlier "
            "version; leave it out"
        )
    return (
        f"the groups of {card.model} keep no summaries of pages; leave it out, ask for kind 'window', or have the "
        f"model loaded with them (ryzanstein models set {card.model} --sparse-attention on)"
    )


CACHE_SECONDS = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}


def cache_ttl(request: GenerationFields) -> float:
    """Seconds for which `request` wants its session's blocks kept; the longest that it names. 0: it names none;
    negative: it wants them not to be."""
    if not isinstance(request, ChatCompletionRequest):
        return 0.0
    options = request.prompt_cache_options
    if options is None and request.prompt_cache_retention is None and are_texts(request.messages):
        return 0.0
    given: list[str | None] = [request.prompt_cache_retention]
    if options is not None:
        given.append(options.ttl)
    named = len(given)
    for message in request.messages:
        if isinstance(message.content, list):
            given += [
                part.prompt_cache_breakpoint.ttl
                for part in message.content
                if part.prompt_cache_breakpoint is not None
            ]
    if options is not None and options.mode == "explicit" and len(given) == named:
        return -1.0
    return max([CACHE_SECONDS.get(ttl, 0.0) for ttl in given if ttl is not None], default=0.0)


def check_beside_grammar(request: GenerationFields) -> None:
    """What a grammar demands and what may not be drawn could leave nothing, so they do not go together. Raises
    `InvalidParameter`."""
    for name in ("min_tokens", "allowed_token_ids", "bad_words"):
        if getattr(request, name):
            raise unsupported(name, "it cannot be combined with a grammar; leave one out")


def checked_fields(given: msgspec.Struct | None, path: str = "") -> list[str]:
    """The fields of `given`, which stands at `path`, that change nothing. Raises `InvalidParameter` for the first that
    is not supported."""
    if given is None:
        return []
    check_neutral(given, path)
    names = ignored_fields(given)
    return [path + name for name in names] if names else names


def ignored_fields(request: msgspec.Struct) -> list[str]:
    """Fields of `request` that change nothing and are not neutral either."""
    found = []
    for name, neutral in marked(type(request), "ignored").items():
        value = getattr(request, name)
        if value is not None and not asks_for_nothing(value, neutral):
            found.append(name)
    return found

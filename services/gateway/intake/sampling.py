"""From a request's fields and a model's defaults to what a ring needs to choose tokens, and to a session.

The session is for sticky routing; a plain prompt has none: schedulers place it by its beginning
(`scheduler/request.py`).
"""

import hashlib
import secrets
from collections.abc import Sequence
from functools import lru_cache

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Message,
)
from services.gateway.intake.validation import check_token_ids, text_of
from services.gateway.lifecycle.request_state import UINT64
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.errors import ContextLengthExceeded
from shared.limits import PROMPT_TOKENS, TRUNCATED_TEXT
from shared.messages import ModelCard, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
LEAST_TRUNCATED = 256 << 10
"""Characters of a text that may be truncated for any model."""


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(request: GenerationFields, card: ModelCard) -> SamplingParams:
    """Given fields, else the model's defaults, else OpenAI's. Raises `InvalidParameter`.

    Without a seed in the request one is drawn, so that a continuation elsewhere draws the same tokens.
    """
    defaults = card.defaults
    bias = request.logit_bias or {}
    if bias:
        check_token_ids("logit_bias", list(bias), card.vocab_size)
    chosen: dict[str, float] = {}
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        chosen[name] = float(defaults.get(name, neutral) if value is None else value)
    top_k = defaults.get("top_k", 0) if request.top_k is None else request.top_k
    return SamplingParams(
        temperature=chosen["temperature"],
        top_k=max(0, int(top_k)),
        top_p=chosen["top_p"],
        min_p=chosen["min_p"],
        seed=secrets.randbits(64) if request.seed is None else request.seed & UINT64,
        repetition_penalty=chosen["repetition_penalty"],
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=bias,
        logprobs=_logprobs(request),
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


def check_text(
    param: str, text: str, card: ModelCard, tokenizer: Tokenizer, prompt_limit: int, *, cut: bool
) -> None:
    """Refuses before it is tokenized what cannot fit by its size alone; where its tokens will be `cut`, what is long
    beside the few of them that are read. `param`: the field; `prompt_limit`: 0, none.

    Raises `ContextLengthExceeded`."""
    most = min(card.context_length, prompt_limit or card.context_length)
    if cut:
        room = max(most * TRUNCATED_TEXT.value, LEAST_TRUNCATED)
        if len(text) > room:
            shown = _shown(param)
            raise ContextLengthExceeded(
                f"Of {shown} at most {most} tokens are read, and it has {len(text):,} characters, more than the "
                f"{room:,} that may be truncated; shorten it ({TRUNCATED_TEXT.cited()}).",
                param=param,
            )
    elif len(text) > most and (fewest := tokenizer.fewest_tokens(text)) > most:
        limit = f"This model's maximum context length is {most} tokens"
        if most < card.context_length:
            limit = f"This server takes prompts of at most {most} tokens ({PROMPT_TOKENS.cited(most)})"
        raise ContextLengthExceeded(
            f"{limit}, and {_shown(param)} resulted in {fewest} tokens or more; shorten it.", param=param
        )


def check_messages(characters: int, card: ModelCard) -> None:
    """Refuses before it is rendered a conversation of so many that no template makes short enough. Raises
    `ContextLengthExceeded`."""
    room = max(card.context_length * TRUNCATED_TEXT.value, LEAST_TRUNCATED)
    if characters > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and your messages have "
            f"{characters:,} characters, more than the {room:,} that can fit; shorten them ({TRUNCATED_TEXT.cited()}).",
            param="messages",
        )


def _shown(param: str) -> str:
    return f"your {param}" if param in ("prompt", "messages") else f"'{param}'"


def max_tokens(
    request: GenerationFields, card: ModelCard, prompt_tokens: int, default: int, *, capped: bool = False
) -> int:
    """Output tokens at most. `default` 0: what the context leaves. `capped`: more than the context leaves is not
    refused, and means what it leaves; a completion has the same default as a chat. Raises `ContextLengthExceeded`."""
    room = card.context_length - prompt_tokens
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    asked = _asked_tokens(request)
    if room < (asked != 0):  # what is told of a prompt alone needs no room behind it
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and your {param} "
            f"resulted in {prompt_tokens} tokens; shorten the {param}.",
            param=param,
        )
    if asked is None and not capped and not isinstance(request, ChatCompletionRequest):
        return min(COMPLETION_MAX_TOKENS, room)
    if asked is None:
        return min(default, room) if default else room
    if asked > room and capped:
        return room
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and you requested "
            f"{prompt_tokens + asked} ({prompt_tokens} in the {param}, {asked} in the completion); "
            f"reduce the {param} or max_tokens.",
            param=param,
        )
    return asked


def _asked_tokens(request: GenerationFields) -> int | None:
    """`max_tokens` under either of its names. Raises `InvalidParameter` when the two disagree."""
    asked = request.max_tokens
    if not isinstance(request, ChatCompletionRequest) or request.max_completion_tokens is None:
        return asked
    if asked not in (None, request.max_completion_tokens):
        raise InvalidParameter(
            f"Invalid 'max_tokens': it is {asked} and 'max_completion_tokens' is "
            f"{request.max_completion_tokens}; give one of the two, the latter preferably.",
            param="max_tokens",
            reason="invalid_value",
        )
    return request.max_completion_tokens


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


def conversation_key(messages: Sequence[Message]) -> str:
    """The session of a conversation that names none: the hash of its beginning.

    The first system message and the first user message stay the same from turn to turn. `developer` is OpenAI's new
    name of `system`.
    """
    system = user = None
    for message in messages:
        if system is None and message.role in ("system", "developer"):
            system = text_of(message)
        elif user is None and message.role == "user":
            user = text_of(message)
    system, user = system or "", user or ""
    return f"auto-{_digest(f'{len(system)}:{system}{len(user)}:{user}')}"


def session_of(tenant: str, name: str, adapter: str = "") -> str:
    """The session that a tenant calls `name`, and nobody else's, whatever they call theirs; "" without a name. With
    each LoRA adapter (its digest) it is another one: what is kept of it is of no use to others."""
    if not name:
        return ""
    return f"{_of_tenant(tenant)}-{adapter[:16]}-{name}" if adapter else f"{_of_tenant(tenant)}-{name}"


def cache_key(given: str | None) -> str:
    """The session that `prompt_cache_key` names: its hash, however long it is; "" when there is none."""
    if not given:
        return ""
    return f"key-{_digest(given)}"


def cache_salt(given: str | None, tenant: str) -> str:
    """What begins the names of a prompt's cached blocks: the hash of what the client gives, and of the tenant where
    tenants share none; "" where there is neither."""
    if not given and not tenant:
        return ""
    text = f"{len(tenant)}:{tenant}:{given or ''}"
    return f"salt-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_of_tenant = lru_cache(1024)(_digest)
"""Of a tenant: the same with all its requests."""

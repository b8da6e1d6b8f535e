"""How many tokens a request may have: of its prompt, of its prediction and of its output."""

from services.gateway.core.errors import InvalidParameter
from services.gateway.core.field_errors import check_range, unsupported
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.schemas import ChatCompletionRequest, ContentPart, GenerationFields
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.errors import ContextLengthExceeded
from shared.limits import PREDICTION, PROMPT_TOKENS
from shared.messages import ModelCard

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


def max_tokens(
    request: GenerationFields, card: ModelCard, prompt_tokens: int, default: int, *, capped: bool = False
) -> int:
    """Output tokens at most. `default` 0: what the context leaves. `capped`: more than the context leaves is not
    refused, and means what it leaves; a completion has the same default as a chat. Raises `ContextLengthExceeded`."""
    room = card.context_length - prompt_tokens
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    asked = asked_tokens(request)
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


def asked_tokens(request: GenerationFields) -> int | None:
    """`max_tokens` under either of its names. Raises `InvalidParameter` when the two disagree."""
    asked = request.max_tokens
    if not isinstance(request, ChatCompletionRequest) or request.max_completion_tokens is None:
        return asked
    if asked not in (None, request.max_completion_tokens):
        raise InvalidParameter(
            f"Invalid 'max_tokens': it is {asked} and 'max_completion_tokens' is "
            f"{request.max_completion_tokens}; give one of the two, the latter preferably.",
            param="max_tokens",
        )
    return request.max_completion_tokens


def fitting(
    prompt: list[int], request: GenerationFields, card: ModelCard, settings: GatewaySettings, *, capped: bool
) -> tuple[list[int], int]:
    """A prompt as far as it is read, and the output tokens that it may have."""
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if not prompt:
        raise InvalidParameter(
            f"Invalid '{param}': it resulted in no token; send at least one character.",
            param=param,
            reason="empty_prompt",
        )
    most = settings.prompt_limit
    if request.truncate_prompt_tokens is not None:
        prompt = truncated(request, card, prompt)
    if most and len(prompt) > most:
        raise ContextLengthExceeded(
            f"This server takes prompts of at most {most} tokens, and yours has {len(prompt)}; shorten it "
            f"({PROMPT_TOKENS.cited(most)}).",
            param=param,
        )
    limit = max_tokens(request, card, len(prompt), settings.default_max_tokens, capped=capped)
    if request.min_tokens is not None:
        check_range("min_tokens", request.min_tokens, 0, limit)
    return prompt, limit


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


async def predicted(request: GenerationFields, card: ModelCard, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the answer that `request` expects. Raises `InvalidParameter`, `ContextLengthExceeded`."""
    if not isinstance(request, ChatCompletionRequest) or request.prediction is None:
        return []
    text = _text(request.prediction.content)
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


def _text(content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise unsupported(f"prediction.content[{index}].{part.type[:64]}", "send text")
    return "".join(part.text or "" for part in content)

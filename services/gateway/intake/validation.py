"""What is checked of a request beside its types and its rules (`rules.py`): conversations, sums, and whether the model
does it.

Every refusal is an `InvalidParameter`, with OpenAI's words and codes.
"""

from collections.abc import Sequence
from typing import cast

from services.gateway.core.errors import InvalidParameter
from services.gateway.core.field_errors import check_range, empty_array
from services.gateway.intake.prompts import tools
from services.gateway.intake.rules import check_fields
from services.gateway.intake.schemas import (
    MAX_SEED,
    PART_TYPES,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    Message,
    are_texts,
)
from shared import limits
from shared.messages import ModelCard

_REFUSED = {
    "generate": "generates no text",
    "embed": "gives no embeddings",
    "classify": "has no classification head",
}
_DOES = {
    "generate": "is a language model",
    "embed": "gives embeddings (/v1/embeddings)",
    "classify": "is a classifier (/v1/classify, /v1/score, /v1/rerank)",
}


def check_task(card: ModelCard, task: str) -> None:
    """Raises `InvalidParameter` where the model does not do `task` (`ModelCard.tasks`)."""
    if card.does(task):
        return
    others = " and ".join(_DOES[other] for other in card.tasks if other in _DOES)
    does = f"it {others}; " if others else ""
    raise InvalidParameter(
        f"Invalid 'model': {card.model} {_REFUSED[task]}; {does}choose a model that does.",
        param="model",
        reason="unsupported_task",
    )


def _check_generation(request: GenerationFields) -> None:
    """What both kinds of request have in common."""
    check_fields(request)
    if request.seed is not None:
        check_range("seed", request.seed, -(2**63), MAX_SEED)
    check_truncation(request.truncate_prompt_tokens)


def check_truncation(count: int | None) -> None:
    """Raises `InvalidParameter` where `truncate_prompt_tokens` leaves nothing."""
    if count == 0:
        raise InvalidParameter(
            "Invalid 'truncate_prompt_tokens': integer below minimum value. Expected a value of at least 1, or of -1 "
            "for what the context has room for.",
            param="truncate_prompt_tokens",
            reason="integer_below_min_value",
        )


# --- chat ----------------------------------------------------------------------------------------


def check_chat(request: ChatCompletionRequest) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`, as far as that needs no model."""
    _check_generation(request)
    if not are_texts(request.messages):
        check_messages(request.messages)
        tools.check_conversation(request.messages)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises `InvalidParameter` for the first thing wrong in one of `messages`, and where they have too much."""
    _check_sizes(messages)
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}].", message)


def _check_sizes(messages: Sequence[Message]) -> None:
    """Raises `InvalidParameter` where there are too many parts or calls in all of them."""
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    calls = sum(len(message.tool_calls or ()) for message in messages)
    for what, count, limit in (("content parts", parts, limits.PARTS), ("tool calls", calls, limits.CALLS)):
        if count > limit.value:
            raise too_many(what, count, limit)


def too_many(what: str, count: int, limit: limits.Limit) -> InvalidParameter:
    """Of all messages together."""
    return InvalidParameter(
        f"Invalid 'messages': they have {count} {what}; join some, or send fewer ({limit.cited()}).",
        param="messages",
        reason="array_above_max_length",
    )


def _check_message(path: str, message: Message) -> None:
    check_fields(message, path)
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            _check_part(f"{path}content[{index}].", part)


def _check_part(path: str, part: ContentPart) -> None:
    if part.type not in PART_TYPES:
        raise InvalidParameter(
            f"Invalid value: '{part.type[:64]}'. This server reads text alone; supported values are: 'text', "
            "'refusal' and 'file', of a text.",
            param=f"{path}type",
        )
    check_fields(part, path)


# --- completions ---------------------------------------------------------------------------------


def check_completion(request: CompletionRequest) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`, as far as that needs no model."""
    _check_generation(request)
    prompts, choices = len(prompts_of(request)), request.n or 1
    if prompts * choices > limits.CHOICES.value:
        raise InvalidParameter(
            f"Invalid 'prompt': {prompts} prompts with n = {choices} make too many choices; send fewer prompts at a "
            f"time ({limits.CHOICES.cited()}).",
            param="prompt",
            reason="array_above_max_length",
        )
    if request.best_of is not None:
        _check_candidates(request, request.best_of, prompts)


def _check_candidates(request: CompletionRequest, best_of: int, prompts: int) -> None:
    check_range("best_of", best_of, request.n or 1, limits.CHOICES.value)
    if prompts * best_of > limits.CHOICES.value:
        raise InvalidParameter(
            "Invalid 'best_of': with these prompts it makes too many candidates; send fewer at a time "
            f"({limits.CHOICES.cited()}).",
            param="best_of",
            reason="integer_above_max_value",
        )


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of `request`, each a text or token ids. Raises `InvalidParameter`."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise empty_array("prompt")
    kinds = set(map(type, prompt))  # of a million token ids, in milliseconds
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", prompt)
    raise InvalidParameter(
        "Invalid type for 'prompt': expected a string, an array of strings, an array of token ids or an "
        "array of arrays of token ids, but got a mixture.",
        param="prompt",
        reason="invalid_type",
    )

"""What is checked of a request beside its types: its fields by the table of their rules (`rules.py`), conversations,
sums, what its model does, and texts by their sizes.

Every refusal is an `InvalidParameter`, with OpenAI's words and codes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from services.gateway.core.errors import InvalidField, InvalidParameter, check_range, empty_array, missing, unsupported
from services.gateway.intake.rules import OneOf, Rule
from services.gateway.intake.schemas import (
    IS_TEXT,
    MAX_SEED,
    PART_TYPES,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    Message,
)
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.schemas import Tool, ToolCall
from shared import limits
from shared.errors import ContextLengthExceeded
from shared.limits import PROMPT_TOKENS, TRUNCATED_TEXT
from shared.messages import ModelCard

# --- fields --------------------------------------------------------------------------------------


@cache
def marked(kind: type[msgspec.Struct], mark: Literal["neutral", "ignored", "why"]) -> dict[str, Any]:
    """The fields of `kind` that are marked so, with the values that ask for nothing, or why others are refused."""
    return {
        field.name: meta.extra[mark]
        for field in msgspec.structs.fields(kind)
        for meta in getattr(field.type, "__metadata__", ())
        if mark in (meta.extra or {})
    }


def asks_for_nothing(value: object, neutral: Sequence[object]) -> bool:
    """Whether `value` is one of `neutral`, also by its type: to Python 0 is False, to a client it is not."""
    return any(type(value) is type(allowed) and value == allowed for allowed in neutral)


class _Neutral(NamedTuple):
    """`field` is not supported."""

    field: str
    values: Sequence[object]
    why: str

    def check(self, request: Any, at: str = "") -> None:
        if not asks_for_nothing(getattr(request, self.field), self.values):
            raise unsupported(at + self.field, self.why)


class _Nested(NamedTuple):
    """`field` is an object with rules of its own."""

    field: str

    def check(self, request: Any, at: str = "") -> None:
        if isinstance(value := getattr(request, self.field), msgspec.Struct):
            check_fields(value, f"{at}{self.field}.")


@cache
def _rules_of(kind: type[msgspec.Struct]) -> tuple[_Neutral | Rule | OneOf | _Nested, ...]:
    """All rules of one table, in the order in which they are checked."""
    why = marked(kind, "why")
    neutral = [_Neutral(name, values, why[name]) for name, values in marked(kind, "neutral").items()]
    nested = [
        _Nested(field.name)
        for field in msgspec.structs.fields(kind)
        for inner in get_args(field.type)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        if marked(inner, "neutral") or bool(getattr(inner, "rules", ()))
    ]
    return (*neutral, *getattr(kind, "rules", ()), *nested)


def check_fields(request: msgspec.Struct, at: str = "") -> None:
    """Raises `InvalidParameter` for the first field of `request`, which stands at `at`, that is not supported, or whose
    rule it breaks."""
    for rule in _rules_of(type(request)):
        if not rule.field or getattr(request, rule.field) is not None:
            rule.check(request, at)


def checked_fields(given: msgspec.Struct | None, path: str = "") -> list[str]:
    """The fields of `given`, which stands at `path`, that change nothing. Raises `InvalidParameter` for the first that
    is not supported."""
    if given is None:
        return []
    check_fields(given, path)
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


def _check_generation(request: GenerationFields) -> list[str]:
    """What both kinds of request have in common."""
    check_fields(request)
    if request.seed is not None:
        check_range("seed", request.seed, -(2**63), MAX_SEED)
    check_truncation(request.truncate_prompt_tokens)
    return ignored_fields(request)


def check_truncation(count: int | None) -> None:
    """Raises `InvalidParameter` where `truncate_prompt_tokens` leaves nothing."""
    if count == 0:
        raise InvalidField(
            "truncate_prompt_tokens",
            "integer below minimum value. Expected a value of at least 1, or of -1 for what the context has room for.",
            reason="integer_below_min_value",
        )


# --- chat ----------------------------------------------------------------------------------------


def check_chat(request: ChatCompletionRequest) -> list[str]:
    """The fields of `request` that change nothing. Raises `InvalidParameter` for the first thing wrong in it, as far as
    that needs no model."""
    ignored = _check_generation(request)
    if not all(map(IS_TEXT, request.messages)):
        check_messages(request.messages)
        check_conversation(request.messages)
    return ignored


def check_messages(messages: Sequence[Message]) -> None:
    """Raises `InvalidParameter` for the first thing wrong in one of `messages`, and where they have too much."""
    _check_sizes(messages)
    for index, message in enumerate(messages):
        path = f"messages[{index}]."
        check_fields(message, path)
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            _check_part(f"{path}content[{number}].", part)


def _check_sizes(messages: Sequence[Message]) -> None:
    """Raises `InvalidParameter` where there are too many parts or calls in all of them."""
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    calls = sum(len(message.tool_calls or ()) for message in messages)
    for what, count, limit in (("content parts", parts, limits.PARTS), ("tool calls", calls, limits.CALLS)):
        if count > limit.value:
            raise too_many(what, count, limit)


def too_many(what: str, count: int, limit: limits.Limit) -> InvalidParameter:
    """Of all messages together."""
    wrong = f"they have {count} {what}; join some, or send fewer ({limit.cited()})."
    return InvalidField("messages", wrong, reason="array_above_max_length")


def _check_part(path: str, part: ContentPart) -> None:
    if part.type not in PART_TYPES:
        raise InvalidParameter(
            f"Invalid value: '{part.type[:64]}'. This server reads text alone; supported values are: 'text', "
            "'refusal' and 'file', of a text.",
            param=f"{path}type",
        )
    check_fields(part, path)


def check_conversation(messages: Sequence[Message], *, may_end_with_calls: bool = False) -> None:
    """Every call is answered, and every answer has its call. `may_end_with_calls`: the last message's are not. Raises
    `InvalidParameter`."""
    waiting: dict[str, str] = {}  # calls without an answer so far, and where they stand
    called: set[str] = set()  # ids of the last assistant message's calls
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role == "tool":
            _answer(path, message, waiting, called)
            continue
        _check_answered(waiting)
        called = set()
        if message.tool_calls and message.role != "assistant":
            raise InvalidParameter(
                f"Invalid value for '{path}.tool_calls': only messages with role 'assistant' have tool calls.",
                param=f"{path}.tool_calls",
            )
        for number, call in enumerate(message.tool_calls or ()):
            _check_call(f"{path}.tool_calls[{number}]", call)
            waiting[call.id] = path
            called.add(call.id)
    if not (may_end_with_calls and messages[-1].role == "assistant"):
        _check_answered(waiting)


def _answer(path: str, message: Message, waiting: dict[str, str], called: set[str]) -> None:
    if not message.tool_call_id:
        raise InvalidParameter(
            f"Missing parameter '{path}.tool_call_id': messages with role 'tool' must have a 'tool_call_id'.",
            param=f"{path}.tool_call_id",
            reason="missing_required_parameter",
        )
    if message.tool_call_id not in called:
        raise InvalidParameter(
            "Invalid parameter: messages with role 'tool' must be a response to a preceding message with "
            f"'tool_calls'; there is no call '{message.tool_call_id[:64]}' in the assistant message before "
            f"'{path}'.",
            param=f"{path}.tool_call_id",
        )
    waiting.pop(message.tool_call_id, None)


def _check_answered(waiting: dict[str, str]) -> None:
    if waiting:
        raise InvalidParameter(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(waiting)}.",
            param=next(iter(waiting.values())),
        )


def check_type(path: str, given: Tool | ToolCall, what: str) -> None:
    """Raises `InvalidParameter` unless `given`, which stands at `path` and is called `what`, is of a known type and has
    what one of that type has."""
    if given.type not in ("function", "custom"):
        raise InvalidParameter(
            f"Invalid value: '{given.type[:64]}'. Supported values are: 'function', 'custom'.", param=f"{path}.type"
        )
    other = "function" if given.type == "custom" else "custom"
    if getattr(given, other) is not None:
        raise unsupported(f"{path}.{other}", f"the {what} is of type '{given.type}'")
    if getattr(given, given.type) is None:
        raise missing(f"{path}.{given.type}")


def _check_call(path: str, call: ToolCall) -> None:
    check_type(path, call, "call")
    if not call.id:
        raise InvalidField(f"{path}.id", "empty string.", reason="empty_string")


# --- completions ---------------------------------------------------------------------------------


def check_completion(request: CompletionRequest) -> list[str]:
    """As `check_chat`."""
    ignored = _check_generation(request)
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
    return ignored


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


# --- models --------------------------------------------------------------------------------------

_REFUSED = {"generate": "generates no text", "embed": "gives no embeddings", "classify": "has no classification head"}
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
    wrong = f"{card.model} {_REFUSED[task]}; {does}choose a model that does."
    raise InvalidField("model", wrong, reason="unsupported_task")


# --- sizes ---------------------------------------------------------------------------------------

LEAST_TRUNCATED = 256 << 10  # characters of a text that may be truncated for any model


def check_text(param: str, text: str, card: ModelCard, tokenizer: Tokenizer, prompt_limit: int, *, cut: bool) -> None:
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


def check_characters(characters: int, card: ModelCard) -> None:
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

"""Checks of request bodies: types, ranges, messages, unsupported fields. Every refusal is an `InvalidParameter`.

The words and codes follow OpenAI's, because clients and their users know them. A body that says what it means in
another form than ours is read all the same, once it is refused:

- A byte order mark before the JSON.
- A whole number with a fraction of zeros or an exponent (6.0, 6e0, 1E2), which is an integer to JSON Schema.
- Fields of messages that are not known: `reasoning` is vLLM's new name for `reasoning_content`, what else clients echo
  back of answers is left out and named.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Protocol, TypeVar

import msgspec

from services.gateway.core.errors import (
    InvalidParameter,
    asks_for_nothing,
    check_range,
    check_size,
    empty_array,
    unsupported,
)
from services.gateway.intake import tools
from services.gateway.intake.schemas import (
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    CacheBreakpoint,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    Message,
)
from shared import limits
from shared.messages import GenerationRequest

T = TypeVar("T")

LARGEST_BIAS = 100
SESSION_ID = re.compile(r"[\x20-\x7e]{1,256}")
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,3})?")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
EXACT_HEADER = "x-ryzanstein-exact"
"""Of an answer: whether its text is a function of the model, its settings and the request (`ModelCard.exact`)."""

_TYPE_ERROR = re.compile(r"Expected `(.+?)`, got `(.+?)`(?: - at (?P<where>.+))?$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_WRONG_KEY = re.compile(r"^Expected `int`, got `str` - at `key` in `\$\.(?P<field>\w+)`$")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
"""What msgspec takes for an integer among the keys of an object."""
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode(
    body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], dropped: list[str] | None = None
) -> T:
    """`body` as a request. `dropped`: gets the unknown fields of messages; None: they are refused. Raises
    `InvalidParameter`."""
    try:
        return _decoded(body, decoder)
    except InvalidParameter:
        other = repaired(body, dropped)
        if other is None:
            raise
    return _decoded(other, decoder)


def _decoded(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if (match := _WRONG_KEY.search(str(error))) is not None:
            raise _wrong_key(body, match["field"]) from None
        raise _from_msgspec(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter(
            f"We could not parse the JSON body of your request ({error}); send one JSON object in UTF-8.",
            param=None,
            reason="invalid_json",
        ) from None
    except RecursionError:
        raise InvalidParameter(
            "The JSON body of your request is nested too deeply.", param=None, reason="invalid_json"
        ) from None


def _from_msgspec(text: str) -> InvalidParameter:
    """msgspec's words for a wrong field, as OpenAI's."""
    if match := _UNKNOWN.match(text):
        name = _join(match["path"], match[1])
        return InvalidParameter(f"Unknown parameter: '{name}'.", param=name, reason="unknown_parameter")
    if match := _MISSING.match(text):
        name = _join(match["path"], match[1])
        return InvalidParameter(
            f"Missing required parameter: '{name}'.", param=name, reason="missing_required_parameter"
        )
    if match := _TYPE_ERROR.match(text):
        return _wrong_type(_param(match["where"]), match[1], match[2])
    message, _, where = text.partition(" - at ")
    param = _param(where)
    return InvalidParameter(f"Invalid value for '{param}': {message}.", param=param, reason="invalid_value")


def _wrong_key(body: bytes | msgspec.Raw, field: str) -> InvalidParameter:
    """`field` of the body is an object by token ids, and has a key that is no integer; msgspec does not say which."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        keys = msgspec.json.decode(fields[field], type=dict[str, msgspec.Raw])
        wrong = next(f" {key[:64]!r}" for key in keys if not _INTEGER.fullmatch(key))
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, StopIteration):
        wrong = ""  # more is wrong with the body
    return InvalidParameter(
        f"Invalid key{wrong} in '{field}': expected the id of a token, an integer from 0 to the size of the model's "
        "vocabulary less 1.",
        param=field,
        reason="invalid_token_id",
    )


def _wrong_type(param: str, expected: str, got: str) -> InvalidParameter:
    kinds = [_WORDS.get(kind, kind) for kind in expected.split(" | ") if kind != "null"]
    wanted = kinds[0] if len(kinds) == 1 else "one of " + " or ".join(kinds)
    what = f"for '{param}'" if param else "of the body"
    given = _WORDS.get(got, got)
    if got == "float" and "int" in expected.split(" | "):
        given = "a number with a fraction, or one beyond 64 bits,"
    return InvalidParameter(
        f"Invalid type {what}: expected {wanted}, but got {given} instead.",
        param=param or None,
        reason="invalid_type",
    )


def _param(where: str | None) -> str:
    """The path in msgspec's "`$.a[0].b`" or "`key` in `$.a`"."""
    return (where or "").rpartition("`$")[2].strip("`").lstrip(".")


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- ranges --------------------------------------------------------------------------------------

PRIORITIES = -(2**31), 2**31 - 1
RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 10),
    ("n", 1, limits.CHOICES.value),
    ("max_tokens", 0, 2**31),
    ("max_completion_tokens", 1, 2**31),
    ("min_tokens", 0, 2**31),
    ("top_k", -1, 2**31),
    ("top_logprobs", 0, limits.LOGPROBS.value),
    ("prompt_logprobs", 0, limits.LOGPROBS.value),
    ("seed", -(2**63), 2**64 - 1),
    ("priority", *PRIORITIES),
)
OPEN_BELOW = ("top_p", "repetition_penalty")
"""Fields that may come close to their lower bound of 0 but not be it."""


_SIZES = (
    ("stop_token_ids", limits.STOP_TOKENS),
    ("logit_bias", limits.LOGIT_BIASES),
    ("user", limits.USER_CHARACTERS),
    ("safety_identifier", limits.USER_CHARACTERS),
    ("cache_salt", limits.CACHE_SALT),
)


def _check_fields(request: GenerationFields) -> None:
    """What both kinds of request have in common."""
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not asks_for_nothing(value, neutral):
            raise unsupported(name)
    for name, low, high in RANGES:
        value = getattr(request, name, None)
        if value is not None:
            check_range(name, value, low, high, open_below=name in OPEN_BELOW)
    if not request.model:
        raise InvalidParameter("Invalid 'model': empty string.", param="model", reason="empty_string")
    _check_stops(request)
    for name, limit in _SIZES:
        check_size(name, getattr(request, name), limit)
    for token, bias in (request.logit_bias or {}).items():
        check_range(f"logit_bias.{token}", bias, -LARGEST_BIAS, LARGEST_BIAS)
    if request.stream_options is not None:
        _check_stream_options(request)


def stop_strings(request: GenerationFields) -> list[str]:
    """The stop strings of `request` as a list."""
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


def _check_stops(request: GenerationFields) -> None:
    stops = stop_strings(request)
    check_size("stop", stops, limits.STOP_STRINGS)
    for stop in stops:
        check_size("stop", stop, limits.STOP_CHARACTERS)
    if not all(stops):
        raise InvalidParameter(
            "Invalid 'stop': empty string. A stop string has at least one character.",
            param="stop",
            reason="empty_string",
        )


def check_min_tokens(request: GenerationFields, max_tokens: int) -> None:
    """Raises `InvalidParameter` when more tokens are demanded than the `max_tokens` that there will be."""
    if request.min_tokens is not None:
        check_range("min_tokens", request.min_tokens, 0, max_tokens)


def check_prompt_logprobs(prompts: Sequence[GenerationRequest], choices: int) -> None:
    """Raises `InvalidParameter` when more is asked for of `prompts`, each for so many choices, than is told."""
    name = "prompt_logprobs" if prompts[0].sampling.logprobs < 0 else "logprobs"
    counts = [len(one.prompt) * (one.prompt_logprobs + 1) for one in prompts]
    for whose, count, limit in (
        ("one prompt", max(counts), limits.PROMPT_LOGPROBS),
        ("all prompts", sum(counts) * choices, limits.REQUEST_PROMPT_LOGPROBS),
    ):
        if count > limit.value:
            raise InvalidParameter(
                f"Invalid '{name}': it asks for {count:,} log probabilities of the tokens of {whose}, of each token "
                "and of the most likely ones in its place; send fewer or shorter prompts, or ask for fewer of the "
                f"most likely tokens ({limit.cited()}).",
                param=name,
                reason="array_above_max_length",
            )


def check_prompt_ids(prompts: Sequence[GenerationRequest], choices: int) -> None:
    """Raises `InvalidParameter` when the token ids of `prompts`, shown with so many choices each, are too many."""
    count = choices * sum(len(one.prompt) for one in prompts)
    if count > limits.PROMPT_TOKEN_IDS.value:
        raise InvalidParameter(
            f"Invalid 'return_token_ids': with all choices it asks for {count:,} token ids of prompts; send fewer or "
            f"shorter prompts, or ask for fewer choices ({limits.PROMPT_TOKEN_IDS.cited()}).",
            param="return_token_ids",
            reason="array_above_max_length",
        )


class _Streamable(Protocol):
    @property
    def stream(self) -> bool | None: ...


def check_streamed(request: _Streamable) -> None:
    """Raises `InvalidParameter` when `request` does not want to be streamed where everything is."""
    if request.stream is False:
        raise InvalidParameter(
            "Invalid value for 'stream': every generation on a WebSocket is streamed; leave it out.",
            param="stream",
            reason="invalid_value",
        )


def _check_stream_options(request: GenerationFields) -> None:
    if not request.stream:
        raise InvalidParameter(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            reason="invalid_value",
        )


def check_messages(messages: Sequence[Message]) -> None:
    """Raises `InvalidParameter` where there are too many of them, or too many parts or calls in them."""
    check_size("messages", messages, limits.MESSAGES)
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    calls = sum(len(message.tool_calls or ()) for message in messages)
    for what, count, limit in (("content parts", parts, limits.PARTS), ("tool calls", calls, limits.CALLS)):
        if count > limit.value:
            raise InvalidParameter(
                f"Invalid 'messages': they have {count} {what}; join some, or send fewer ({limit.cited()}).",
                param="messages",
                reason="array_above_max_length",
            )


# --- chat ----------------------------------------------------------------------------------------


def check_chat(request: ChatCompletionRequest) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`."""
    _check_fields(request)
    if request.max_tokens is not None:
        check_range("max_tokens", request.max_tokens, 1, 2**31)
    if not request.messages:
        raise empty_array("messages")
    check_messages(request.messages)
    for index, message in enumerate(request.messages):
        check_message(f"messages[{index}]", message)
    tools.check_conversation(request.messages)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameter(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            param="top_logprobs",
            reason="invalid_value",
        )


# --- completions ---------------------------------------------------------------------------------


def check_completion(request: CompletionRequest) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`."""
    _check_fields(request)
    if request.logprobs is not None:
        check_range("logprobs", request.logprobs, 0, limits.LOGPROBS.value)
    prompts, choices = len(prompts_of(request)), request.n or 1
    if prompts * choices > limits.CHOICES.value:
        raise InvalidParameter(
            f"Invalid 'prompt': {prompts} prompts with n = {choices} make too many choices; send fewer prompts at a "
            f"time ({limits.CHOICES.cited()}).",
            param="prompt",
            reason="array_above_max_length",
        )


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of `request`, each a text or token ids. Raises `InvalidParameter`."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise empty_array("prompt")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    for kind in (str, list):
        if all(isinstance(item, kind) for item in prompt):
            return [item for item in prompt if not isinstance(item, int)]
    raise InvalidParameter(
        "Invalid type for 'prompt': expected a string, an array of strings, an array of token ids or an "
        "array of arrays of token ids, but got a mixture.",
        param="prompt",
        reason="invalid_type",
    )


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidParameter` when one of `ids` is no token of the model."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidParameter(
            f"Invalid '{name}': the token id {wrong} is not within 0 and {vocab_size - 1}, "
            "the vocabulary of the model.",
            param=name,
            reason="invalid_token_id",
        )


def check_session_id(value: str | None) -> str:
    """The X-Session-ID header, "" when it is missing. Raises `InvalidParameter`."""
    return _checked_header(value, SESSION_ID, "X-Session-ID", "1 to 256 printable ASCII characters")


def check_request_id(value: str | None) -> str:
    """The x-request-id header, "" when it is missing. Raises `InvalidParameter`."""
    wanted = "1 to 128 printable ASCII characters without spaces"
    return _checked_header(value, REQUEST_ID, "x-request-id", wanted)


def check_request_id_field(value: str | None) -> str:
    """vLLM's `request_id`, "" when it is missing. Raises `InvalidParameter`."""
    if value is not None and not REQUEST_ID.fullmatch(value):
        raise InvalidParameter(
            "Invalid 'request_id': expected 1 to 128 printable ASCII characters without spaces.",
            param="request_id",
            reason="invalid_value",
        )
    return value or ""


def _checked_header(value: str | None, pattern: re.Pattern[str], name: str, wanted: str) -> str:
    if value is None:
        return ""
    if not pattern.fullmatch(value):
        raise InvalidParameter(
            f"Invalid header '{name}': expected {wanted}.", param=name, reason="invalid_header"
        )
    return value


def check_idempotency_key(value: str | None) -> str:
    """The Idempotency-Key header, "" when it is missing. Raises `InvalidParameter`."""
    wanted = "1 to 255 printable ASCII characters without spaces"
    return _checked_header(value, IDEMPOTENCY_KEY, "Idempotency-Key", wanted)


def check_background(value: str | None, limit: float) -> float:
    """The seconds in the X-Ryzanstein-Background header, 0 when it is missing. Raises `InvalidParameter`."""
    if value is None:
        return 0.0
    wanted = f"seconds as a number above 0 and at most {limit:g}"
    name = "X-Ryzanstein-Background"
    given = float(_checked_header(value, SECONDS, name, wanted))
    if not 0 < given <= limit:
        raise InvalidParameter(
            f"Invalid header '{name}': expected {wanted}.", param=name, reason="invalid_header"
        )
    return given


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PARTS = ("text", "refusal")
OTHER_PARTS = ("image_url", "input_audio", "file")


def check_message(path: str, message: Message) -> None:
    if message.role not in ROLES:
        supported = ", ".join(f"'{role}'" for role in ROLES)
        raise InvalidParameter(
            f"Invalid value: '{message.role[:64]}'. Supported values are: {supported}.",
            param=f"{path}.role",
            reason="invalid_value",
        )
    for name, neutral in NEUTRAL_IN_MESSAGE.items():
        value = getattr(message, name)
        if value is not None and not asks_for_nothing(value, neutral):
            raise unsupported(f"{path}.{name}")
    if message.content is None and not (message.tool_calls or message.function_call or message.refusal):
        raise InvalidParameter(
            f"Missing required parameter: '{path}.content'; send a string or an array of text parts.",
            param=f"{path}.content",
            reason="missing_required_parameter",
        )
    if isinstance(message.content, list):
        _check_parts(f"{path}.content", message)


def _check_parts(path: str, message: Message) -> None:
    parts = message.content
    assert isinstance(parts, list)
    if not parts:
        raise empty_array(path)
    for index, part in enumerate(parts):
        _check_part(f"{path}[{index}]", part)


def _check_part(path: str, part: ContentPart) -> None:
    if part.type not in PARTS:
        supported = " and ".join(f"'{kind}'" for kind in PARTS)
        raise InvalidParameter(
            f"Invalid value: '{part.type[:64]}'. This server reads text alone; supported values are: {supported}.",
            param=f"{path}.type",
            reason="invalid_value",
        )
    if getattr(part, part.type) is None:
        raise InvalidParameter(
            f"Missing required parameter: '{path}.{part.type}'.",
            param=f"{path}.{part.type}",
            reason="missing_required_parameter",
        )
    others = (kind for kind in PARTS if kind != part.type)
    for name in (*OTHER_PARTS, *others):
        if getattr(part, name) is not None:
            raise unsupported(f"{path}.{name}")
    check_breakpoint(f"{path}.prompt_cache_breakpoint", part.prompt_cache_breakpoint)


def check_breakpoint(path: str, given: CacheBreakpoint | None) -> None:
    """Raises `InvalidParameter`."""
    if given is not None and given.ttl is not None:
        raise unsupported(f"{path}.ttl")


def text_of(message: Message) -> str:
    """A message's content as one text; parts are joined by line breaks. What was refused was said, too."""
    content = message.content or ""
    if isinstance(content, list):
        content = "\n".join(part.text or part.refusal or "" for part in content)
    return (
        "\n".join((content, message.refusal))
        if content and message.refusal
        else content or message.refusal or ""
    )


BOM = b"\xef\xbb\xbf"
_NUMBERS = re.compile(rb"[\[\]\s,0-9.eE+-]+")
_ZEROS = re.compile(rb"(?<=[0-9])\.0+(?![0-9])")
_WITH_EXPONENT = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+")
_LONGEST = 20
"""Characters of a number with an exponent that is read here, and digits of what comes of it: no field takes more."""
_MANY = 4096
"""Bytes of numbers; of more only fractions are looked at: these are the tokens of a prompt, and may be millions."""
_KNOWN = frozenset(field.encode_name for field in msgspec.structs.fields(Message))

_Fields = dict[str, msgspec.Raw]


def repaired(body: bytes | msgspec.Raw, dropped: list[str] | None) -> bytes | None:
    """`body` in our form; None where nothing helps. `dropped` gets the fields of messages that were left out; None:
    none is."""
    data = bytes(body).removeprefix(BOM)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
        fields = {name: _with_integers(value) for name, value in fields.items()}
        if dropped is not None and "messages" in fields:
            messages = msgspec.json.decode(fields["messages"], type=list[_Fields])
            fields["messages"] = msgspec.Raw(
                msgspec.json.encode([_known(message, dropped) for message in messages])
            )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data if len(data) < len(bytes(body)) else None
    return msgspec.json.encode(fields)


def _with_integers(value: msgspec.Raw) -> msgspec.Raw:
    """A number, or an array of them: whole ones without fraction and exponent."""
    data = bytes(value)
    if not _NUMBERS.fullmatch(data):
        return value
    data = _ZEROS.sub(b"", data)
    return msgspec.Raw(_WITH_EXPONENT.sub(_whole, data) if len(data) <= _MANY else data)


def _whole(number: re.Match[bytes]) -> bytes:
    """Exactly, which a float is not."""
    text = number[0]
    if len(text) > _LONGEST:
        return text
    try:
        exact = Decimal(text.decode())
        is_whole = exact.adjusted() < _LONGEST and exact == exact.to_integral_value()
    except ArithmeticError:
        return text
    return b"%d" % int(exact) if is_whole else text


def _known(message: _Fields, dropped: list[str]) -> _Fields:
    if _KNOWN.issuperset(message):
        return message
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    dropped += (f"messages[].{name}" for name in message if name not in _KNOWN)
    return {name: value for name, value in message.items() if name in _KNOWN}

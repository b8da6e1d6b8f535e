"""Lines of a fine-tuning file, as OpenAI defines them, and the plain texts that TRL knows beside them.

    supervised   {"messages": [...], "tools": [...], "parallel_tool_calls": true}
                 {"prompt": "2 + 2 =", "completion": " 4"}
    dpo          {"input": {"messages": [...], "tools": [...]}, "preferred_output": [{"role": "assistant", ...}],
                  "non_preferred_output": [{"role": "assistant", ...}]}

Messages are those of chat completions, and tools too. An assistant's message of a supervised line may have a `weight`.
"""

import difflib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.decoding import decode
from services.gateway.intake.schemas import ReasoningEffort, ResponseFormat, TrainedMessage
from services.gateway.tool_calls.schemas import FunctionDefinition, Tool
from shared import limits
from shared.messages.training import TrainingMethod

_Messages = Annotated[list[TrainedMessage], limits.MESSAGES.length(min_length=1)]
_Output = Annotated[list[TrainedMessage], Meta(min_length=1)]


class ConversationLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation; also the `input` of a preference pair."""

    messages: _Messages
    tools: Annotated[list[Tool], limits.TOOLS.length()] | None = None
    parallel_tool_calls: bool | None = None
    # OpenAI's old name of `tools`.
    functions: Annotated[list[FunctionDefinition], limits.TOOLS.length()] | None = None
    response_format: ResponseFormat | None = None  # without effect, as in serving: no chat template shows it
    reasoning_effort: ReasoningEffort | None = None
    # Variables for the chat template, as in requests for chat completions.
    chat_template_kwargs: dict[str, Any] | None = None


class TextLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text to be completed, and how."""

    prompt: str
    completion: Annotated[str, Meta(min_length=1)]


class PreferenceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation with a better and a worse answer."""

    input: ConversationLine
    preferred_output: _Output
    non_preferred_output: _Output


Line = ConversationLine | TextLine | PreferenceLine


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_conversation = msgspec.json.Decoder(ConversationLine)
_text = msgspec.json.Decoder(TextLine)
_pair = msgspec.json.Decoder(PreferenceLine)
_KNOWN = sorted(
    {
        field.encode_name
        for kind in (ConversationLine, TextLine, PreferenceLine, TrainedMessage)
        for field in msgspec.structs.fields(kind)
    }
)
# What ShareGPT, Alpaca and TRL call fields.
_ELSEWHERE = {
    "conversations": "messages",
    "conversation": "messages",
    "from": "role",
    "value": "content",
    "text": "messages",
    "instruction": "prompt",
    "output": "completion",
    "response": "completion",
    "chosen": "preferred_output",
    "rejected": "non_preferred_output",
}


def line_of(data: bytes, method: TrainingMethod) -> Line:
    """A line of a file for jobs of that method. Raises `InvalidParameter`."""
    try:
        fields = _fields.decode(data)
    except msgspec.ValidationError:
        raise InvalidParameter("This line is not a JSON object.", param=None, reason="invalid_json_line") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidParameter(
            f"This line is not parseable as valid JSON ({why[:200]}).", param=None, reason="invalid_json_line"
        ) from None
    is_other = "messages" in fields or "prompt" in fields
    _check_method(method, is_pair="input" in fields or "preferred_output" in fields, is_other=is_other)
    try:
        if method == "dpo":
            return decode(data, _pair)
        if "prompt" in fields and "messages" not in fields:
            return decode(data, _text)
        return decode(data, _conversation)
    except InvalidParameter as error:
        raise _with_near_name(error) from None


def _check_method(method: TrainingMethod, *, is_pair: bool, is_other: bool) -> None:
    if method == "supervised" and is_pair and not is_other:
        raise InvalidParameter(
            "This line is a preference pair ('input', 'preferred_output'), and the job's method is supervised: create "
            "it with the method dpo, or send conversations ('messages').",
            param="input",
        )
    if method == "dpo" and is_other and not is_pair:
        raise InvalidParameter(
            "This line is not a preference pair, and the job's method is dpo: send 'input', 'preferred_output' and "
            "'non_preferred_output', or create it with the method supervised.",
            param="messages",
        )


def _with_near_name(error: InvalidParameter) -> InvalidParameter:
    if error.reason != "unknown_parameter":
        return error
    path, _, name = (error.param or "").rpartition(".")
    near = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, _KNOWN, 1)), "")
    what = f"did you mean '{f'{path}.' if path else ''}{near}'?" if near else "leave it out."
    return InvalidParameter(
        f"{error.message.rstrip('.')[:300]}; {what}", param=(error.param or "")[:128], reason=error.reason
    )

"""A conversation with tool calls as the model's chat template wants it. Pure.

A template that knows tools gets them as transformers passes them: `tools` as functions with their JSON Schema, calls in
`tool_calls`, results in messages of the role `tool`. One that does not gets the same in words: the tools in the system
message, calls in the assistant's text, results in the user's, in the notation that Hermes 2 Pro began.
"""

import hashlib
import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.core.errors import InvalidParameter, too_deep, unsupported
from services.gateway.intake.schemas import IS_TEXT, ChatCompletionRequest, Message, TrainedMessage
from services.gateway.tokenizer.templates import TemplateOptions, Traits
from services.gateway.tool_calls.families import FAMILIES
from services.gateway.tool_calls.parsers.values import to_json
from services.gateway.tool_calls.schemas import INPUT, FunctionDefinition, ToolCall
from shared import limits

DEFAULT_FAMILY = "hermes"  # how tools are put into words for a template without any
_WRITTEN_AS_JSON = frozenset(("granite", "jamba", "nemotron_json", "internlm", "phi4_mini_json"))
_NINE = re.compile(r"[a-zA-Z0-9]{9}")

Shown = dict[str, Any]  # a message as templates get it


class _Call(NamedTuple):
    id: str
    name: str
    arguments: str


def functions_for_template(functions: Iterable[FunctionDefinition]) -> list[dict[str, Any]]:
    """As transformers passes them; templates rely on a description and on parameters."""
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": {"type": "object", "properties": {}} | (function.parameters or {}),
            }
            | ({"return": function.output_schema} if function.output_schema else {}),
        }
        for function in functions
    ]


def messages_for_template(
    messages: Sequence[Message], traits: Traits, *, native: bool, family: str = ""
) -> list[Shown]:
    """`native`: the template shows calls and results; otherwise they are put into words: those of `family`, where the
    template shows its tools, and results as they are."""
    if all(map(IS_TEXT, messages)):
        return [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
    plain = list(_messages(messages))
    if not native:
        return list(_in_words(plain, family))
    if not traits.several:
        plain = list(_one_by_one(plain))
    if traits.family == "kimi_k2":
        plain = list(_numbered(plain))
    return [_native(message, traits) for message in plain]


def with_instructions(messages: list[Shown], text: str, traits: Traits) -> list[Shown]:
    """`text` in the system message, or where the template has none, before the user's first words."""
    role = "system" if traits.system else "user"
    first = next((message for message in messages if message["role"] == role), None)
    if first is None:
        return [{"role": role, "content": text}, *messages]
    parts = [first["content"], text] if traits.system else [text, first["content"]]
    changed = first | {"content": "\n\n".join(parts)}
    return [changed if message is first else message for message in messages]


def instructions(functions: Sequence[FunctionDefinition], form: str) -> str:
    """What a model is told of tools where its template tells it nothing. `form`: how it is to write a call."""
    described = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions_for_template(functions))
    return (
        "# Tools\n\n"
        "You can call functions. These are their names and the JSON Schemas of their arguments:\n"
        f"<tools>\n{described}\n</tools>\n\n"
        "To call a function, write its name and its arguments exactly in this form, once for each call:\n"
        f"{form}\n\n"
        "The results are sent to you within <tool_response></tool_response>. Without need of a function, answer in "
        "plain words."
    )


# --- messages, older and newer form alike ---------------------------------------------------------


_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's new name of `system`, its old one of `tool`


def _messages(messages: Sequence[Message]) -> Iterator[Shown]:
    """Messages as dicts, their calls as a list of `_Call` under `calls`, results with the name of their function."""
    names: dict[str, str] = {}
    last = ""
    for index, message in enumerate(messages):
        calls = [_call_of(call) for call in message.tool_calls or ()]
        if message.function_call is not None:
            last = f"function{index}"
            calls = [_Call(last, message.function_call.name, message.function_call.arguments)]
        names |= {call.id: call.name for call in calls}
        shown: Shown = {"role": _ROLES.get(message.role, message.role), "content": _text(message)}
        identity = last if message.role == "function" else message.tool_call_id
        fields = {
            "name": message.name or names.get(identity or ""),
            "tool_call_id": identity or None,
            "thinking": message.reasoning_content,  # gpt-oss' name of it
            "reasoning_content": message.reasoning_content,
            "calls": calls or None,
            "weight": message.weight if isinstance(message, TrainedMessage) else None,
        }
        yield shown | {name: value for name, value in fields.items() if value is not None}


def _call_of(call: ToolCall) -> _Call:
    """One of a custom tool as the model has written it."""
    if call.custom is not None:
        return _Call(call.id, call.custom.name, to_json({INPUT: call.custom.input}))
    assert call.function is not None, "it was checked"
    return _Call(call.id, call.function.name, call.function.arguments)


def _text(message: Message) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content
    return "\n".join(part.text or "" for part in message.content)


# --- for templates that know calls ----------------------------------------------------------------


def _native(message: Shown, traits: Traits) -> Shown:
    calls = message.get("calls")
    shown = {name: value for name, value in message.items() if name != "calls"}
    if "tool_call_id" in shown:
        shown["tool_call_id"] = _identity(shown["tool_call_id"], traits)
    if calls:
        if traits.family == "openai" and shown["content"]:
            shown.pop("thinking", None)  # its template takes one of them before a call
        shown["content"] = shown["content"] or (None if traits.null_content else "")
        shown["tool_calls"] = [
            {
                "id": _identity(call.id, traits),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(call.arguments) if traits.objects else call.arguments,
                },
            }
            for call in calls
        ]
    return shown


def _numbered(messages: Sequence[Shown]) -> Iterator[Shown]:
    """With ids as Kimi's templates show them in the place of names: `functions.f:0`, counted through all calls."""
    new: dict[str, str] = {}
    for message in messages:
        changed = dict(message)
        if "calls" in message:
            changed["calls"] = [
                call._replace(id=new.setdefault(call.id, f"functions.{call.name}:{len(new)}"))
                for call in message["calls"]
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = new.get(message["tool_call_id"], message["tool_call_id"])
        yield changed


def _identity(identity: str, traits: Traits) -> str:
    """Any id as nine letters and digits, where the template takes no other."""
    if traits.any_id or _NINE.fullmatch(identity):
        return identity
    return hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()[:9]


def _object(arguments: str) -> Any:
    """What is no object stays as it is: the model wrote it so."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not too_deep(value) else arguments


def _one_by_one(messages: Sequence[Shown]) -> Iterator[Shown]:
    """A message with several calls as one message each, followed by its result."""
    results = {message["tool_call_id"]: message for message in messages if "tool_call_id" in message}
    for message in messages:
        calls = message.get("calls", ())
        if "tool_call_id" in message:
            if message is results.get(message["tool_call_id"]):
                yield message
            continue
        if len(calls) < 2:
            yield message
            continue
        for number, call in enumerate(calls):
            yield message | {"calls": [call], "content": None if number else message["content"]}
            if result := results.pop(call.id, None):
                yield result


# --- for templates that do not --------------------------------------------------------------------


def _in_words(messages: Sequence[Shown], family: str) -> Iterator[Shown]:
    results: list[str] = []
    for message in messages:
        content = message["content"] or ""
        if message["role"] == "tool" and not family:
            results.append(f"<tool_response>\n{content}\n</tool_response>")
            continue
        if results and message["role"] == "user":  # one turn of the user, for templates that insist on turns
            content = "\n".join([*results, content])
        elif results:
            yield {"role": "user", "content": "\n".join(results)}
        results = []
        parts = [content] if content or not message.get("calls") else []
        parts += [_written(call, family) for call in message.get("calls", ())]
        shown = {name: value for name, value in message.items() if name not in ("calls", "tool_call_id")}
        yield shown | {"content": "\n".join(parts)}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _written(call: _Call, family: str) -> str:
    value = _object(call.arguments)
    if family == "pythonic" and isinstance(value, dict):
        given = ", ".join(f"{name}={to_json(argument)}" for name, argument in value.items())
        return f"<|tool_call_start|>[{call.name}({given})]<|tool_call_end|>"
    form = FAMILIES[family if family in _WRITTEN_AS_JSON else DEFAULT_FAMILY].form
    before, _, behind = form.partition('"NAME"')
    return before + to_json(call.name) + behind.replace("ARGUMENTS", to_json(value))


# --- what a template is told besides --------------------------------------------------------------


SWITCHES = ("enable_thinking", "thinking")  # variables with which templates turn reasoning on and off
_RESERVED = ("messages", "tools", "add_generation_prompt")


def switched(traits: Traits, *, on: bool) -> dict[str, Any]:
    """The field of a request with which the model's template turns its reasoning on or off; none: it has no switch."""
    switches = {name: on for name in SWITCHES if name in traits.variables}
    return {"chat_template_kwargs": switches} if switches else {}


_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "verbosity")
_of_options = operator.attrgetter(*_OPTIONS)
_NO_OPTIONS = (None,) * len(_OPTIONS)
_USUAL = TemplateOptions()


def template_options(request: ChatCompletionRequest, traits: Traits) -> TemplateOptions:
    """Raises `InvalidParameter`."""
    if _of_options(request) == _NO_OPTIONS:
        return _USUAL
    continues = bool(request.continue_final_message)
    asked = request.add_generation_prompt
    return TemplateOptions(
        add_generation_prompt=not continues if asked is None else asked,
        continue_final=continues,
        variables=_variables(request, traits),
    )


def _variables(request: ChatCompletionRequest, traits: Traits) -> dict[str, Any]:
    """`chat_template_kwargs`, and what `reasoning_effort` and `verbosity` mean for the template. What it does not look
    at is told by `ignored_by_template`."""
    given = request.chat_template_kwargs or {}
    for name in given:
        if name in _RESERVED:
            raise InvalidParameter(
                f"Unsupported parameter: 'chat_template_kwargs.{name}' is set by other fields of the request; leave "
                "it out.",
                param="chat_template_kwargs",
                reason="unsupported_parameter",
            )
        if too_deep(given[name]):
            wrong = f"Invalid 'chat_template_kwargs.{name}': it is nested too deeply ({limits.NESTING.cited()})."
            raise InvalidParameter(wrong, param="chat_template_kwargs")
    looked_at = {name: value for name, value in given.items() if name in traits.variables}
    return _effort(request.reasoning_effort, traits) | _verbosity(request.verbosity, traits) | looked_at


def _effort(effort: str | None, traits: Traits) -> dict[str, Any]:
    """None where the template does not look at it."""
    if effort is None:
        return {}
    if "reasoning_effort" in traits.variables:
        return {"reasoning_effort": effort}
    return next(({name: effort != "none"} for name in SWITCHES if name in traits.variables), {})


def _verbosity(verbosity: str | None, traits: Traits) -> dict[str, Any]:
    if verbosity is not None and "verbosity" in traits.variables:
        return {"verbosity": verbosity}
    if verbosity in (None, "medium"):
        return {}
    raise unsupported("verbosity", "this model's chat template has none; leave it out")


def ignored_by_template(request: ChatCompletionRequest, traits: Traits) -> tuple[str, ...]:
    """Fields of the request that the template does not look at."""
    if request.chat_template_kwargs is None and request.reasoning_effort is None:
        return ()
    given = request.chat_template_kwargs or {}
    ignored = tuple(f"chat_template_kwargs.{name}" for name in given if name not in traits.variables)
    without_effort = request.reasoning_effort and not _effort(request.reasoning_effort, traits)
    return (*ignored, "reasoning_effort") if without_effort else ignored

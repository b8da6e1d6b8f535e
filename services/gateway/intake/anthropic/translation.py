"""A request of /v1/messages as the chat completion that it becomes, and errors in the client's words. Pure.

| Anthropic's | a chat completion's |
| --- | --- |
| system, messages | messages; a prefill is `continue_final_message` |
| max_tokens, stop_sequences, metadata.user_id | max_completion_tokens, stop, safety_identifier |
| tools, tool_choice any, tool | tools, tool_choice required, function |
| output_config.format | response_format |
| thinking, output_config.effort | the switch that the model's template has |
"""

import contextlib
import hashlib
import re
from typing import Any

from services.gateway.core.errors import InvalidParameter, check_range, missing, renamed, unsupported
from services.gateway.intake.anthropic.conversation import chat_messages
from services.gateway.intake.anthropic.schemas import (
    LEAST_BUDGET,
    CustomTool,
    InputFields,
    MessagesRequest,
    ToolChoice,
)
from services.gateway.intake.chat import SWITCHES, reasoning_of
from services.gateway.intake.decoding import convert
from services.gateway.intake.rules import check_neutral
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.templates import Traits
from shared.limits import USER_CHARACTERS
from shared.messages import ModelCard

_INSTEAD = {
    "documents": "send document blocks",
    "frequency_penalty": "this API has none",
    "functions": "use 'tools'",
    "image_url": "this API has image blocks",
    "input": "use 'messages'",
    "logprobs": "ask /v1/chat/completions",
    "max_completion_tokens": "use 'max_tokens'",
    "n": "send the request several times",
    "parallel_tool_calls": "use 'tool_choice.disable_parallel_tool_use'",
    "presence_penalty": "this API has none",
    "reasoning_content": "send a thinking block",
    "reasoning_effort": "use 'output_config.effort' or 'thinking'",
    "response_format": "use 'output_config.format'",
    "seed": "this API has none",
    "stop": "use 'stop_sequences'",
    "stream_options": "every stream tells its usage",
    "tool_call_id": "send a tool_result block in a user's message",
    "tool_calls": "send tool_use blocks",
    "user": "use 'metadata.user_id'",
}
"""Fields of OpenAI's API, by their last name, and what this one has in their place."""
_ROLE = re.compile(r"messages\[\d+\]\.role")
_TYPES = (
    (re.compile(r"content\[\d+\]\.type$"), "blocks of text, thinking, tools, search results and documents"),
    (re.compile(r"\.source\.type$"), "documents of the types 'text' and 'content'"),
)
_NAMES = (
    ("max_completion_tokens", "max_tokens"),
    ("response_format", "output_config.format"),
    ("safety_identifier", "metadata.user_id"),
    ("stop", "stop_sequences"),
)
_FUNCTION = re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b")


def asks_for_reasoning(request: InputFields) -> bool:
    return request.thinking is not None or bool(request.output_config and request.output_config.effort)


def reasoning_fields(
    request: InputFields, card: ModelCard, traits: Traits
) -> tuple[dict[str, Any], list[str]]:
    """The chat's fields with which this model thinks as it is asked to, and what of the request changes nothing. Raises
    `InvalidParameter` where a model that never thinks is to."""
    thinking = request.thinking.type if request.thinking else None
    effort = request.output_config.effort if request.output_config else None
    if thinking == "enabled" and not reasoning_of(card, traits):
        raise unsupported("thinking", "this model does not think; leave it out, or send 'adaptive'")
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    switches = [name for name in SWITCHES if name in traits.variables]
    if thinking and switches:
        fields["chat_template_kwargs"] = dict.fromkeys(switches, thinking != "disabled")
    elif thinking == "disabled" and reasoning_of(card, traits):
        ignored.append("thinking.type")  # it always thinks
    if effort and "reasoning_effort" in traits.variables:
        fields["reasoning_effort"] = effort
    elif effort:
        ignored.append("output_config.effort")
    return fields, ignored


# --- as a chat completion ------------------------------------------------------------------------


def chat_request(request: InputFields, reasoning: dict[str, Any]) -> ChatCompletionRequest:
    """`reasoning`: what `reasoning_fields` has said. Raises `InvalidParameter`."""
    messages = chat_messages(request.system, request.messages)
    body: dict[str, Any] = {"model": request.model, "messages": messages, **reasoning}
    if messages[-1]["role"] == "assistant":
        if not messages[-1]["content"]:
            path = f"messages[{len(request.messages) - 1}].content"
            raise missing(path, "a text with which the answer begins, or end with a message of the user")
        body["continue_final_message"] = True
    if request.tools:
        body["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _choice(request.tool_choice)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "output", "schema": request.output_config.format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        body |= _generating(request)
    return convert(body, ChatCompletionRequest)


def _generating(request: MessagesRequest) -> dict[str, Any]:
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise missing("thinking.budget_tokens", f"{LEAST_BUDGET} or more")
        check_range("thinking.budget_tokens", thinking.budget_tokens, LEAST_BUDGET, request.max_tokens - 1)
    user = request.metadata.user_id if request.metadata else None
    if user is not None and len(user) > USER_CHARACTERS.value:
        user = hashlib.blake2b(user.encode(), digest_size=16).hexdigest()
    body = {
        "max_completion_tokens": request.max_tokens,
        "safety_identifier": user,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
    }
    return {name: value for name, value in body.items() if value is not None}


def _tool(path: str, given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise InvalidParameter(
            f"Unsupported value: '{path}' is the tool '{str(kind)[:64]}', which Anthropic's servers or models bring; "
            "this server has tools of the client alone; describe it with 'name' and 'input_schema'.",
            param=f"{path}.type",
            reason="unsupported_parameter",
        )
    try:
        tool = convert(given, CustomTool)
    except InvalidParameter as error:
        name = f"{path}.{error.param}" if error.param else path
        message = error.message.replace(f"'{error.param}'", f"'{name}'")
        raise InvalidParameter(message, param=name, reason=error.reason) from None
    check_neutral(tool, f"{path}.")
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    if choice.name is None:
        raise missing("tool_choice.name", "the name of one of 'tools'")
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


# --- errors --------------------------------------------------------------------------------------


def with_hint(error: InvalidParameter) -> InvalidParameter:
    """What of OpenAI's dialect is told apart from a typing error."""
    param = error.param or ""
    hint = _INSTEAD.get(param.rpartition(".")[2]) if error.reason == "unknown_parameter" else None
    for pattern, supported in _TYPES:
        if pattern.search(param):
            hint = f"this server reads {supported}"
    if _ROLE.fullmatch(param):
        hint = "use 'system' at the top of the request for instructions, and tool_result blocks for results"
    if hint is None:
        return error
    return InvalidParameter(f"{error.message.rstrip('.')}; {hint}.", param=error.param, reason=error.reason)


def own_words() -> contextlib.AbstractContextManager[None]:
    """Errors of the chat path, in the words of this API."""
    return renamed(_name_of, "messages")


def _name_of(param: str) -> str:
    name = _FUNCTION.sub(r"\1", param)
    if name != param:
        return name.replace(".parameters", ".input_schema")
    for theirs, ours in _NAMES:
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return ours
    return param

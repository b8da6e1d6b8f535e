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

from services.gateway.core.errors import check_range, missing, renamed, unsupported
from services.gateway.intake.anthropic.conversation import chat_messages
from services.gateway.intake.anthropic.schemas import (
    LEAST_BUDGET,
    CustomTool,
    InputFields,
    MessagesRequest,
    ToolChoice,
)
from services.gateway.intake.chat import reasoning_of, switched
from services.gateway.intake.decoding import convert
from services.gateway.intake.rules import check_neutral
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.templates import Traits
from shared.limits import USER_CHARACTERS
from shared.messages import ModelCard

NAMES = {
    "functions": "tools",
    "input": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_content": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "safety_identifier": "metadata.user_id",
    "stop": "stop_sequences",
    "tool_call_id": "tool_use_id",
    "tool_calls": "tool_use",
    "user": "metadata.user_id",
}
"""The chat's fields, and what they are called here; a longer name before its beginning."""
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
    fields = switched(traits, on=thinking != "disabled") if thinking else {}
    ignored = list[str]()
    if thinking == "disabled" and not fields and reasoning_of(card, traits):
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


def _tool(path: str, tool: CustomTool) -> dict[str, Any]:
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


def own_words() -> contextlib.AbstractContextManager[None]:
    """Errors of the chat path, in the words of this API."""
    return renamed(NAMES, "messages", place_of=_place_of)


def _place_of(param: str) -> str:
    """Of a tool: it is no object within another here."""
    flat = _FUNCTION.sub(r"\1", param)
    return param if flat == param else flat.replace(".parameters", ".input_schema")

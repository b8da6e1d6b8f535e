"""A request of /v1/messages as the chat completion that it becomes, and errors in the client's words. Pure.

| Anthropic's | a chat completion's |
| --- | --- |
| system, messages | messages; a prefill is `continue_final_message` |
| max_tokens, stop_sequences, metadata.user_id | max_completion_tokens, stop, safety_identifier |
| tools, tool_choice any, tool | tools, tool_choice required, function |
| output_config.format | response_format |
| thinking, output_config.effort | the switch that the model's template has |
"""

import hashlib
import re
from functools import partial
from typing import Any

from services.gateway.core.errors import missing, renamed, unsupported
from services.gateway.intake.anthropic.conversation import chat_messages
from services.gateway.intake.anthropic.schemas import (
    CountTokensRequest,
    CustomTool,
    JsonFormat,
    MessagesRequest,
    ToolChoice,
)
from services.gateway.intake.chat import reasoning_of, switched
from services.gateway.intake.decoding import convert
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.templates import Traits
from shared.limits import USER_CHARACTERS
from shared.messages import ModelCard

NAMES = {
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


def reasoning_fields(
    request: CountTokensRequest, card: ModelCard, traits: Traits
) -> tuple[dict[str, Any], list[str]]:
    """The chat's fields with which this model thinks as it is asked to, and what of the request changes nothing. Raises
    `InvalidParameter` where a model that never thinks is to."""
    thinking = request.thinking.type if request.thinking else None
    effort = request.output_config.effort if request.output_config else None
    if thinking == "enabled" and not reasoning_of(card, traits):
        raise unsupported("thinking", "this model does not think; leave it out, or send 'adaptive'")
    fields = switched(traits, on=thinking != "disabled") if thinking else {}
    always = thinking == "disabled" and not fields and reasoning_of(card, traits)
    ignored = ["thinking.type"] if always else []
    if effort and "reasoning_effort" in traits.variables:
        fields["reasoning_effort"] = effort
    elif effort:
        ignored.append("output_config.effort")
    return fields, ignored


# --- as a chat completion ------------------------------------------------------------------------


def chat_request(request: CountTokensRequest, reasoning: dict[str, Any]) -> ChatCompletionRequest:
    """`reasoning`: what `reasoning_fields` has said. Raises `InvalidParameter`."""
    messages = chat_messages(request)
    output = request.output_config
    prefilled = messages[-1]["role"] == "assistant"
    if prefilled and not messages[-1]["content"]:
        path = f"messages[{len(request.messages) - 1}].content"
        raise missing(path, "a text with which the answer begins, or end with a message of the user")
    body = {
        "model": request.model,
        "messages": messages,
        "continue_final_message": prefilled or None,
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "response_format": _format(output.format) if output and output.format else None,
        **(_choice(request.tool_choice) if request.tool_choice else {}),
        **reasoning,
    }
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in ("stream", "temperature", "top_k", "top_p")}
        body["max_completion_tokens"] = request.max_tokens
        if request.metadata and request.metadata.user_id:
            body["safety_identifier"] = _user(request.metadata.user_id)
        body["stop"] = request.stop_sequences
    return convert({name: value for name, value in body.items() if value is not None}, ChatCompletionRequest)


def _format(form: JsonFormat) -> dict[str, Any]:
    schema = {"name": "output", "schema": form.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _user(identity: str) -> str:
    """A longer id than a chat's by its digest."""
    if len(identity) <= USER_CHARACTERS.value:
        return identity
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


# --- errors --------------------------------------------------------------------------------------


def _place_of(param: str) -> str:
    """Of a tool: it is no object within another here."""
    flat = _FUNCTION.sub(r"\1", param)
    return param if flat == param else flat.replace(".parameters", ".input_schema")


own_words = partial(renamed, NAMES, "messages", place_of=_place_of)
"""Errors of the chat path, in the words of this API."""

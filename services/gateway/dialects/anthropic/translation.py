"""A request of /v1/messages as the chat completion that it becomes, and errors in the client's words. Pure.

| Anthropic's | a chat completion's |
| --- | --- |
| system, messages | messages; a prefill is `continue_final_message` |
| max_tokens, stop_sequences, metadata.user_id | max_completion_tokens, stop, safety_identifier |
| tools, tool_choice any, tool | tools, tool_choice required, function |
| output_config.format | response_format |
| thinking, output_config.effort | the switch that the model's template has |

    user       text, tool_result          ──▶ a tool message for each result, then the user's text
    assistant  thinking, text, tool_use   ──▶ one message: reasoning_content, content, tool_calls
    system     text                       ──▶ a system message

Consecutive messages of one role are one turn, as at Anthropic's. An assistant's turn at the end is a prefill, which
the answer goes on with. What is refused of a message names the block.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from services.gateway.core.errors import InvalidField, InvalidParameter, convert, missing, renamed, unsupported
from services.gateway.dialects.anthropic.schemas import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    DocumentBlock,
    JsonFormat,
    MessageParam,
    MessagesRequest,
    PlainSource,
    Readable,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.intake.prompts.chat import reasoning_of
from services.gateway.intake.prompts.conversation import switched
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.intake.validation import too_many
from services.gateway.tokenizer.templates import Traits
from shared import limits
from shared.messages import ModelCard

# The chat's fields, and what they are called here; a longer name before its beginning.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_content": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "safety_identifier": "metadata.user_id",
    "stop": "stop_sequences",
    "tool_calls": "tool_use",
    "user": "metadata.user_id",
}
Placed = tuple[str, Block]  # a block, and where it stands in the request
# Whose blocks these are; texts are everybody's.
_ROLES = {
    **dict.fromkeys(("thinking", "redacted_thinking", "tool_use"), "assistant"),
    **dict.fromkeys(("tool_result", "image", "document", "search_result"), "user"),
}
_FUNCTION = re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b")


def reasoning_fields(request: CountTokensRequest, card: ModelCard, traits: Traits) -> tuple[dict[str, Any], list[str]]:
    """The chat's fields with which this model thinks as it is asked to, and what of the request changes nothing. Raises
    `InvalidParameter` where a model that never thinks is to."""
    thinking = request.thinking.type if request.thinking else None
    effort = request.output_config.effort if request.output_config else None
    if thinking == "enabled" and not reasoning_of(card, traits):
        raise unsupported("thinking", "this model does not support thinking; leave it out, or send 'adaptive'")
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
    messages = _messages(request)
    output = request.output_config
    prefilled = messages[-1]["role"] == "assistant"
    if prefilled and not messages[-1]["content"]:
        path = f"messages[{len(request.messages) - 1}].content"
        raise missing(path, "a text with which the answer begins, or end with a message of the user")
    body = {
        "model": request.model,
        "messages": messages,
        "continue_final_message": prefilled or None,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "response_format": _format(output.format) if output and output.format else None,
        **(_choice(request.tool_choice) if request.tool_choice else {}),
        **reasoning,
    }
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = request.chat_template_kwargs | reasoning.get("chat_template_kwargs", {})
    if isinstance(request, MessagesRequest):
        for name in ("close_objects", "sparse_attention", "stream", "temperature", "top_k", "top_p"):
            body[name] = getattr(request, name)
        body["max_completion_tokens"] = request.max_tokens
        body["safety_identifier"] = request.metadata and request.metadata.user_id
        body["stop"] = request.stop_sequences
    return convert({name: value for name, value in body.items() if value is not None}, ChatCompletionRequest)


def _format(form: JsonFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema, "strict": True}}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    given = {name: getattr(tool, name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": given | {"parameters": tool.input_schema}}


def _choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


# --- messages ------------------------------------------------------------------------------------


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Raises `InvalidParameter`."""
    system = request.system
    shown = [{"role": "system", "content": _joined("system", system)}] if system else []
    calls: dict[str, str] = {}  # those of the turn before, which the next one answers, and where they stand
    count = 0
    for role, turn in groupby(enumerate(request.messages), lambda one: one[1].role):
        blocks = list[Placed]()
        for index, message in turn:
            blocks += _blocks(index, message)
        if (count := count + len(blocks)) > limits.PARTS.value:
            raise too_many("blocks", count, limits.PARTS)
        shown += _assistant(blocks, calls) if role == "assistant" else _other(role, blocks, calls)
        if calls and role != "assistant":
            raise _unanswered(calls)
    if calls:
        raise _unanswered(calls)
    return shown


def _blocks(index: int, message: MessageParam) -> list[Placed]:
    path, content = f"messages[{index}].content", message.content
    if isinstance(content, str):
        return [(path, TextBlock(text=content))]
    if not content:
        raise missing(path, "a text or at least one block")
    placed = [(f"{path}[{number}]", block) for number, block in enumerate(content)]
    for place, block in placed:
        kind = str(block.__struct_config__.tag)
        if (whose := _ROLES.get(kind, message.role)) != message.role:
            why = f"a {kind} block belongs in a message with the role '{whose}', not '{message.role}'."
            raise InvalidField(place, why)
    return placed


def _assistant(blocks: Sequence[Placed], calls: dict[str, str]) -> list[dict[str, Any]]:
    made = list[dict[str, Any]]()
    for path, block in blocks:
        if isinstance(block, ToolUseBlock):
            if calls.setdefault(block.id, path) != path:
                raise InvalidField(f"{path}.id", f"'{block.id[:64]}' is the id of another tool_use already.")
            made.append(_call(block))
    texts = [block.text for _, block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for _, block in blocks if isinstance(block, ThinkingBlock)]
    message = {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not made else None,
        "reasoning_content": "\n".join(thoughts) if thoughts else None,
        "tool_calls": made or None,
    }
    return [message]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _other(role: str, blocks: Sequence[Placed], calls: dict[str, str]) -> list[dict[str, Any]]:
    """Results first, wherever they stand among the user's blocks: they answer what was before."""
    results, texts = list[dict[str, Any]](), list[str]()
    for path, block in blocks:
        if isinstance(block, ToolResultBlock):
            results.append(_result(path, block, calls))
        else:
            texts.append(block.text if isinstance(block, TextBlock) else _text(path, block))
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts else results


def _result(path: str, block: ToolResultBlock, calls: dict[str, str]) -> dict[str, Any]:
    """An error is told in words: templates have no other way."""
    if calls.pop(block.tool_use_id, None) is None:
        raise InvalidField(
            f"{path}.tool_use_id",
            f"there is no tool_use with the id '{block.tool_use_id[:64]}' in the assistant's turn before, or it has a "
            "tool_result already; send each call with one result behind it.",
        )
    text = _joined(f"{path}.content", block.content)
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _joined(path: str, content: str | Sequence[Readable] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(f"{path}[{number}]", block) for number, block in enumerate(content))


def _text(path: str, block: Block) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, _joined(f"{path}.content", block.content)])
    if isinstance(block, DocumentBlock):
        source, within = block.source, f"{path}.source.content"
        text = source.data if isinstance(source, PlainSource) else _joined(within, source.content)
        return "\n".join(part for part in (block.title, block.context, text) if part)
    raise unsupported(path, "it is an image, and this model does not see images; leave it out, or describe it")


def _unanswered(calls: dict[str, str]) -> InvalidParameter:
    identity, path = next(iter(calls.items()))
    return InvalidField(
        path,
        f"the tool_use '{identity[:64]}' has no tool_result in the user's message after it; send one for each "
        "tool_use, or leave both out.",
    )


# --- errors --------------------------------------------------------------------------------------


def _place_of(param: str) -> str:
    """Of a tool: it is no object within another here."""
    return _FUNCTION.sub(r"\1", param).replace(".parameters", ".input_schema")


# Errors of the chat path, in the words of this API.
own_words = partial(renamed, NAMES, "messages", place_of=_place_of)

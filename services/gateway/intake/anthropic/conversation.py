"""Anthropic's turns as a chat completion's messages. Pure.

    user       text, tool_result          ──▶ a tool message for each result, then the user's text
    assistant  thinking, text, tool_use   ──▶ one message: reasoning_content, content, tool_calls
    system     text                       ──▶ a system message

Consecutive messages of one role are one turn, as at Anthropic's. An assistant's turn at the end is a prefill, which
the answer goes on with. Every refusal is an `InvalidParameter` that names the block.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from services.gateway.core.errors import InvalidParameter, missing, unsupported
from services.gateway.intake.anthropic.schemas import (
    Block,
    CountTokensRequest,
    DocumentBlock,
    MessageParam,
    PlainSource,
    Readable,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.intake.rules import too_many
from shared import limits

Placed = tuple[str, Block]
"""A block, and where it stands in the request."""
_ROLES = {
    **dict.fromkeys(("thinking", "redacted_thinking", "tool_use"), "assistant"),
    **dict.fromkeys(("tool_result", "image", "document", "search_result"), "user"),
}
"""Whose blocks these are; texts are everybody's."""


def chat_messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Raises `InvalidParameter`."""
    system = request.system
    shown = [{"role": "system", "content": _joined("system", system)}] if system else []
    calls: dict[str, str] = {}
    """Those of the turn before, which the next one answers, and where they stand."""
    count = 0
    for role, turn in groupby(enumerate(request.messages), lambda one: one[1].role):
        blocks = list[Placed]()
        for index, message in turn:
            blocks += _blocks(index, message)
        if (count := count + len(blocks)) > limits.PARTS.value:
            raise too_many("blocks", count, limits.PARTS)
        said = _assistant(blocks) if role == "assistant" else _other(role, blocks, calls)
        if calls:
            raise _unanswered(calls)
        calls = _calls(blocks) if role == "assistant" else {}
        shown += said
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
            why = f"a {kind} block belongs into a message of the role '{whose}', not '{message.role}'."
            raise _wrong(place, why)
    return placed


def _calls(blocks: Sequence[Placed]) -> dict[str, str]:
    calls: dict[str, str] = {}
    for path, block in blocks:
        if isinstance(block, ToolUseBlock) and calls.setdefault(block.id, path) != path:
            raise _wrong(f"{path}.id", f"'{block.id[:64]}' is the id of another tool_use already.")
    return calls


def _assistant(blocks: Sequence[Placed]) -> list[dict[str, Any]]:
    texts = [block.text for _, block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for _, block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for _, block in blocks if isinstance(block, ToolUseBlock)]
    message = {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not calls else None,
        "reasoning_content": "\n".join(thoughts) if thoughts else None,
        "tool_calls": calls or None,
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
        raise _wrong(
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
    raise unsupported(
        path, "it is an image, and this model does not see images; leave it out, or describe it"
    )


def _unanswered(calls: dict[str, str]) -> InvalidParameter:
    identity, path = next(iter(calls.items()))
    return _wrong(
        path,
        f"the tool_use '{identity[:64]}' has no tool_result in the user's message after it; send one for each "
        "tool_use, or leave both out.",
    )


def _wrong(path: str, what: str) -> InvalidParameter:
    return InvalidParameter(f"Invalid '{path}': {what}", param=path, reason="invalid_value")

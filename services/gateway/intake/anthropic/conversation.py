"""Anthropic's turns as a chat completion's messages. Pure.

    user       text, tool_result          ──▶ a tool message for each result, then the user's text
    assistant  thinking, text, tool_use   ──▶ one message: reasoning_content, content, tool_calls
    system     text                       ──▶ a system message

Consecutive messages of one role are one turn, as at Anthropic's. An assistant's turn at the end is a prefill, which
the answer goes on with. Every refusal is an `InvalidParameter` that names the block.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from services.gateway.core.errors import InvalidParameter, missing
from services.gateway.intake.anthropic.schemas import (
    Block,
    ContentSource,
    DocumentBlock,
    ImageBlock,
    MessageParam,
    PlainSource,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shared import limits

Placed = tuple[str, Block]
"""A block, and where it stands in the request."""
_ROLES = {
    **dict.fromkeys(("thinking", "redacted_thinking", "tool_use"), "assistant"),
    **dict.fromkeys(("tool_result", "image", "document", "search_result"), "user"),
}
"""Whose blocks these are; texts are everybody's."""


def chat_messages(
    system: str | Sequence[TextBlock] | None, messages: Sequence[MessageParam]
) -> list[dict[str, Any]]:
    """Raises `InvalidParameter`."""
    shown: list[dict[str, Any]] = []
    if system:
        text = system if isinstance(system, str) else "\n".join(block.text for block in system)
        shown.append({"role": "system", "content": text})
    calls: dict[str, str] = {}
    """Calls of the turn before, which the next one answers, and where they stand."""
    for role, blocks in _turns(messages):
        if calls and role != "user":
            raise _unanswered(calls)
        if role == "assistant":
            shown.append(_assistant(blocks, calls))
            continue
        shown += _other(role, blocks, calls)
        if calls:
            raise _unanswered(calls)
    if calls:
        raise _unanswered(calls)
    return shown


def _turns(messages: Sequence[MessageParam]) -> Iterator[tuple[str, list[Placed]]]:
    role, blocks, count = messages[0].role, list[Placed](), 0
    for index, message in enumerate(messages):
        if message.role != role:
            yield role, blocks
            role, blocks = message.role, []
        path, content = f"messages[{index}].content", message.content
        if isinstance(content, str):
            blocks.append((path, TextBlock(text=content)))
        elif not content:
            raise missing(path, "a text or at least one block")
        else:
            count += len(content)
            if count > limits.PARTS.value:
                raise InvalidParameter(
                    f"Invalid 'messages': they have {count} blocks or more; join some ({limits.PARTS.cited()}).",
                    param="messages",
                    reason="array_above_max_length",
                )
            blocks += [(f"{path}[{number}]", block) for number, block in enumerate(content)]
    yield role, blocks


def _assistant(blocks: Sequence[Placed], calls: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, made = list[str](), list[str](), list[dict[str, Any]]()
    for path, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            if block.id in calls:
                raise _wrong(f"{path}.id", f"'{block.id[:64]}' is the id of another tool_use already.")
            calls[block.id] = path
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            made.append({"id": block.id, "type": "function", "function": function})
        else:
            _check_role(path, block, "assistant")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not made else None,
    }
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if made:
        message["tool_calls"] = made
    return message


def _other(role: str, blocks: Sequence[Placed], calls: dict[str, str]) -> list[dict[str, Any]]:
    """Results first, wherever they stand among the user's blocks: they answer what was before."""
    results, texts = list[dict[str, Any]](), list[str]()
    for path, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        _check_role(path, block, role)
        if isinstance(block, ToolResultBlock):
            if calls.pop(block.tool_use_id, None) is None:
                raise _wrong(
                    f"{path}.tool_use_id",
                    f"there is no tool_use with the id '{block.tool_use_id[:64]}' in the assistant's turn before, or "
                    "it has a tool_result already; send each call with one result behind it.",
                )
            text = _result(path, block)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            texts.append(_text(path, block))
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts else results


def _result(path: str, block: ToolResultBlock) -> str:
    """An error is told in words: templates have no other way."""
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(_text(f"{path}.content[{number}]", one) for number, one in enumerate(content))
    return f"Error: {content}" if block.is_error else content


def _text(path: str, block: Block) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(one.text for one in block.content)])
    if isinstance(block, DocumentBlock):
        about = [part for part in (block.title, block.context) if part]
        return "\n".join([*about, *_source(f"{path}.source", block.source)])
    assert isinstance(block, ImageBlock), "the other blocks have been read"
    raise InvalidParameter(
        f"Unsupported content: '{path}' is an image, and this model does not see images; leave it out, or describe it.",
        param=path,
        reason="unsupported_parameter",
    )


def _source(path: str, source: PlainSource | ContentSource) -> Iterator[str]:
    if isinstance(source, PlainSource):
        yield source.data
    elif isinstance(source.content, str):
        yield source.content
    else:
        for number, one in enumerate(source.content):
            yield _text(f"{path}.content[{number}]", one)


def _check_role(path: str, block: Block, role: str) -> None:
    kind = str(block.__struct_config__.tag)
    whose = _ROLES.get(kind, role)
    if whose != role:
        raise _wrong(path, f"a {kind} block belongs into a message of the role '{whose}', not '{role}'.")


def _unanswered(calls: dict[str, str]) -> InvalidParameter:
    identity, path = next(iter(calls.items()))
    return _wrong(
        path,
        f"the tool_use '{identity[:64]}' has no tool_result in the user's message after it; send one for each "
        "tool_use, or leave both out.",
    )


def _wrong(path: str, what: str) -> InvalidParameter:
    return InvalidParameter(f"Invalid '{path}': {what}", param=path, reason="invalid_value")

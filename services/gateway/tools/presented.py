"""Reasoning, content and calls in OpenAI's shape. `reasoning_content` is DeepSeek's extension, which vLLM has too."""

from collections.abc import Sequence
from typing import Any

from services.gateway.tools.calls import CallDelta
from shared.messages.records import Parsing


def delta(text: str, reasoning: str, calls: Sequence[CallDelta], parsing: Parsing) -> dict[str, Any]:
    """The `delta` of a chunk. A call's id, type and name come once, with its first part."""
    fields: dict[str, Any] = {}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if text:
        fields["content"] = text
    if calls and parsing.legacy:
        fields["function_call"] = _function(calls[0])
    elif calls:
        fields["tool_calls"] = [_begun(call) if call.id else _more(call) for call in calls]
    return fields


def message(text: str, reasoning: str, calls: Sequence[CallDelta], parsing: Parsing | None) -> dict[str, Any]:
    """The `message` of a whole response; its content is null where there are calls alone."""
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls and parsing is not None and parsing.legacy:
        fields["function_call"] = _function(calls[0])
    elif calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in calls
        ]
    return fields


def _begun(call: CallDelta) -> dict[str, Any]:
    return {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}


def _more(call: CallDelta) -> dict[str, Any]:
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _function(call: CallDelta) -> dict[str, str]:
    fields = {"name": call.name} if call.name else {}
    return fields | {"arguments": call.arguments}

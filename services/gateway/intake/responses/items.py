"""Items: what a client sends, as it is listed and kept, and as messages for a chat template. Pure.

    input of a request ──▶ items with ids ──▶ messages
    "Hi"                   {"id": "msg_..", "type": "message", "role": "user", ...}

Ids hold the identity of the response that they came with, so that an item is found by its id alone:
`msg_<identity>_in_<n>` of its input, `msg_<identity>_<n>` of its output.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.gateway.core.errors import InvalidParameter, empty_array, missing, unsupported
from services.gateway.intake.decoding import decode
from services.gateway.intake.responses.schemas import (
    AnyItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    ItemReference,
    MessageItem,
    Part,
    ReasoningItem,
)
from services.gateway.intake.rules import check_breakpoint
from services.gateway.streams.response_items import ABBREVIATIONS, Item

T = TypeVar("T")

_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(?:in_)?\d{1,6}")
_OTHER_TEXT = ("refusal", "annotations", "logprobs", "prompt_cache_breakpoint")
_REFUSED = tuple(
    field.name for field in msgspec.structs.fields(Part) if field.name not in ("type", "text", *_OTHER_TEXT)
)


class Reference(NamedTuple):
    """An item of another response, to be put in its place."""

    path: str
    id: str


def input_id(kind: str, identity: str, index: int) -> str:
    return f"{ABBREVIATIONS[kind]}_{identity}_in_{index}"


def identity_in(item_id: str) -> str | None:
    """The identity of the response that an item belongs to; None when it is no id of ours."""
    match = _ITEM_ID.fullmatch(item_id)
    return match[1] if match else None


# --- from the client -----------------------------------------------------------------------------


def read_input(given: str | Sequence[msgspec.Raw], identity: str) -> list[Item | Reference]:
    """The items of a request, checked. Raises `InvalidParameter`."""
    if isinstance(given, str):
        return [_message(input_id("message", identity, 0), "user", given)]
    return [_read_item(raw, f"input[{index}]", identity, index) for index, raw in enumerate(given)]


def _read_item(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item | Reference:
    kind = _decode(raw, AnyItem, path)
    name = kind.type or ("message" if kind.role is not None else "item_reference")
    reader = _READERS.get(name)
    if reader is None:
        raise InvalidParameter(
            f"Invalid value: '{name[:64]}'. This server takes items of the types: {', '.join(_READERS)}.",
            param=f"{path}.type",
            reason="invalid_value",
        )
    return reader(raw, path, identity, index)


def _read_message(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item:
    item = _decode(raw, MessageItem, path)
    if item.phase is not None:
        raise unsupported(f"{path}.phase")
    texts = _texts(item.content, f"{path}.content")
    shown = _message(item.id or input_id("message", identity, index), item.role, *texts)
    return shown | {"status": item.status or "completed"}


def _read_call(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item:
    item = _decode(raw, FunctionCallItem, path)
    _check_given(item, path, ("async_", "caller", "created_by", "namespace"))
    return {
        "id": item.id or input_id("function_call", identity, index),
        "type": "function_call",
        "status": item.status or "completed",
        "call_id": item.call_id,
        "name": item.name,
        "arguments": item.arguments,
    }


def _read_output(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item:
    item = _decode(raw, FunctionCallOutputItem, path)
    _check_given(item, path, ("caller", "created_by", "namespace"))
    output: Any = item.output
    if not isinstance(output, str):
        output = [{"type": "input_text", "text": text} for text in _texts(output, f"{path}.output")]
    return {
        "id": item.id or input_id("function_call_output", identity, index),
        "type": "function_call_output",
        "status": item.status or "completed",
        "call_id": item.call_id,
        "output": output,
    }


def _read_reasoning(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item:
    item = _decode(raw, ReasoningItem, path)
    shown: Item = {
        "id": item.id or input_id("reasoning", identity, index),
        "type": "reasoning",
        "summary": item.summary or [],
    }
    return shown | {"content": [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]}


def _read_reference(raw: msgspec.Raw, path: str, identity: str, index: int) -> Reference:
    return Reference(f"{path}.id", _decode(raw, ItemReference, path).id)


_READERS: dict[str, Callable[[msgspec.Raw, str, str, int], Item | Reference]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
    "item_reference": _read_reference,
}


def _decode(raw: msgspec.Raw, kind: type[T], path: str) -> T:
    """Raises `InvalidParameter` with the path of the field within the request."""
    try:
        return decode(raw, msgspec.json.Decoder(kind))
    except InvalidParameter as error:
        if error.param is None:
            raise InvalidParameter(
                f"Invalid type for '{path}': expected an object.", param=path, reason="invalid_type"
            ) from None
        name = f"{path}.{error.param}"
        message = error.message.replace(f"'{error.param}'", f"'{name}'")
        raise InvalidParameter(message, param=name, reason=error.reason) from None


def _message(item_id: str, role: str, *texts: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    parts: list[Item] = [{"type": kind, "text": text} for text in texts]
    if role == "assistant":
        parts = [part | {"annotations": []} for part in parts]
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": parts}


def _texts(content: str | list[Part], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not content:
        raise empty_array(path)
    return [_text(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _text(part: Part, path: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    _check_given(part, path, _REFUSED)
    check_breakpoint(f"{path}.", part.prompt_cache_breakpoint)
    text: str | None = getattr(part, name)
    if text is None:
        raise missing(f"{path}.{name}")
    return text


def _check_given(item: msgspec.Struct, path: str, names: Sequence[str]) -> None:
    for name in names:
        if getattr(item, name):
            raise unsupported(f"{path}.{name.strip('_')}")


# --- for the chat template -----------------------------------------------------------------------


def chat_messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat completion's messages. Reasoning, the message behind it and the calls that follow
    are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message":
            _add_message(messages, item)
        elif kind == "reasoning":
            thought = text_of(item.get("content") or "")
            if thought:
                messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
        elif kind == "function_call":
            _turn_of_assistant(messages)["tool_calls"].append(
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
            )
        elif kind == "function_call_output":
            content = text_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # it has thought, and said nothing
    return messages


def _add_message(messages: list[dict[str, Any]], item: Item) -> None:
    """The answer behind a thought is the same turn."""
    role, text = item["role"], text_of(item["content"])
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("content", "") is None and "tool_calls" not in last:
        last["content"] = text
    else:
        messages.append({"role": role, "content": text})


def text_of(content: str | Sequence[Item]) -> str:
    """A content as one text; parts are joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _turn_of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    turn = messages[-1]
    turn.setdefault("tool_calls", [])
    return turn


def droppable(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin when its oldest items are dropped: not with the output of a call that is
    gone, and never behind the last item. In order, without 0."""
    return [index for index in range(1, len(items)) if items[index]["type"] != "function_call_output"]

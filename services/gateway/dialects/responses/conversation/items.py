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

from services.gateway.core.errors import InvalidField, InvalidParameter, empty_array, missing, unsupported
from services.gateway.dialects.responses.conversation import compaction
from services.gateway.dialects.responses.schemas import (
    AnyItem,
    CallItem,
    CallOutputItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemReference,
    MessageItem,
    Part,
    ReasoningItem,
    TriggerItem,
)
from services.gateway.dialects.responses.stream.items import ABBREVIATIONS, Item, qualified
from services.gateway.intake.decoding import decode

T = TypeVar("T")

_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(?:in_)?\d{1,6}")
_OF_FILES = ("detail", "file_data", "file_id", "filename")
_REFUSED = ("file_url", "image_url", "input_audio")
_REFUSED_IN_CALLS = ("async_", "created_by")
_REFUSED_IN_OUTPUTS = ("created_by",)
OUTPUTS = ("function_call_output", "custom_tool_call_output")  # what belongs to a call before it


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


def read_input(given: str | Sequence[msgspec.Raw], identity: str, param: str = "input") -> list[Item | Reference]:
    """The items of a request, which stand in its field `param`, checked. Raises `InvalidParameter`."""
    if isinstance(given, str):
        return [_message(input_id("message", identity, 0), "user", given)]
    items = [_read_item(raw, f"{param}[{index}]", identity, index) for index, raw in enumerate(given)]
    for index, item in enumerate(items):
        last = param == "input" and index == len(items) - 1
        if not last and isinstance(item, dict) and item["type"] == compaction.TRIGGER:
            raise InvalidField(
                f"{param}[{index}].type", f"a '{compaction.TRIGGER}' must be the last item of a response's 'input'."
            )
    return items


def _read_item(raw: msgspec.Raw, path: str, identity: str, index: int) -> Item | Reference:
    kind = _decode(raw, AnyItem, path)
    name = kind.type or ("message" if kind.role is not None else "item_reference")
    if name not in _READERS:
        raise InvalidParameter(
            f"Invalid value: '{name[:64]}'. This server takes items of the types: {', '.join(_READERS)}.",
            param=f"{path}.type",
        )
    form, read = _READERS[name]
    item = _decode(raw, form, path)
    return read(item, path, item.id or (input_id(name, identity, index) if name in ABBREVIATIONS else ""))


def _read_message(item: MessageItem, path: str, item_id: str) -> Item:
    parts = _parts(item.content, f"{path}.content", item.role)
    shown = {
        "id": item_id,
        "type": "message",
        "status": item.status or "completed",
        "role": item.role,
        "content": parts,
    }
    return shown if item.phase is None else shown | {"phase": item.phase}


def _read_call(item: CallItem, path: str, item_id: str) -> Item:
    _check_given(item, path, _REFUSED_IN_CALLS)
    _, content = _CALLS[item.type]
    shown = {
        "id": item_id,
        "type": item.type,
        "status": item.status or "completed",
        "call_id": item.call_id,
        "name": item.name,
        content: getattr(item, content),
    }
    return shown | _from_where(item)


def _from_where(item: CallItem | CallOutputItem) -> Item:
    caller: Item = {"caller": {"type": item.caller.type}} if item.caller else {}
    return caller | ({"namespace": item.namespace} if item.namespace else {})


def _read_output(item: CallOutputItem, path: str, item_id: str) -> Item:
    _check_given(item, path, _REFUSED_IN_OUTPUTS)
    output: Any = item.output
    if not isinstance(output, str):
        output = _parts(output, f"{path}.output", "tool")
    shown = {
        "id": item_id,
        "type": item.type,
        "status": item.status or "completed",
        "call_id": item.call_id,
        "output": output,
    }
    return shown | _from_where(item)


def _read_reasoning(item: ReasoningItem, path: str, item_id: str) -> Item:
    content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
    return {"id": item_id, "type": "reasoning", "summary": item.summary or [], "content": content}


def _read_compaction(item: CompactionItem, path: str, item_id: str) -> Item:
    summary = compaction.summary_of({"encrypted_content": item.encrypted_content}, path)
    return compaction.item_of(summary, item_id)


# By the type: what an item is decoded as, and how it is listed, given its path and its id.
_READERS: dict[str, tuple[type[Any], Callable[[Any, str, str], Item | Reference]]] = {
    "message": (MessageItem, _read_message),
    "function_call": (FunctionCallItem, _read_call),
    "function_call_output": (CallOutputItem, _read_output),
    "custom_tool_call": (CustomToolCallItem, _read_call),
    "custom_tool_call_output": (CallOutputItem, _read_output),
    "reasoning": (ReasoningItem, _read_reasoning),
    compaction.KIND: (CompactionItem, _read_compaction),
    compaction.TRIGGER: (TriggerItem, lambda item, path, item_id: compaction.question()),
    "item_reference": (ItemReference, lambda item, path, item_id: Reference(f"{path}.id", item_id)),
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


def _message(item_id: str, role: str, text: str) -> Item:
    content = [_text_part(text, role)]
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": content}


def _text_part(text: str, role: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _parts(content: str | list[Part], path: str, role: str) -> list[Item]:
    """Texts and files as they are listed."""
    if isinstance(content, str):
        return [_text_part(content, role)]
    if not content:
        raise empty_array(path)
    return [_part(part, f"{path}[{index}]", role) for index, part in enumerate(content)]


def _part(part: Part, path: str, role: str) -> Item:
    _check_given(part, path, _REFUSED)
    return _read_part(part, path, role) | _breakpoint(part)


def _breakpoint(part: Part) -> Item:
    given = part.prompt_cache_breakpoint
    if given is None:
        return {}
    shown = {"mode": given.mode} | ({"ttl": given.ttl} if given.ttl else {})
    return {"prompt_cache_breakpoint": shown}


def _read_part(part: Part, path: str, role: str) -> Item:
    if part.type == "input_file":
        return _file_part(part, path)
    name = "refusal" if part.type == "refusal" else "text"
    _check_given(part, path, _OF_FILES)
    text: str | None = getattr(part, name)
    if text is None:
        raise missing(f"{path}.{name}")
    return _text_part(text, role)


def _file_part(part: Part, path: str) -> Item:
    """Whether it is there and a text is seen when it is read (`input_files.py`)."""
    _check_given(part, path, ("text", "refusal"))
    if not (part.file_id or part.file_data):
        raise missing(f"{path}.file_data", "the file, or a 'file_id'")
    given = {name: getattr(part, name) for name in _OF_FILES}
    return {"type": "input_file"} | {name: value for name, value in given.items() if value is not None}


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
    texts: dict[int, Content] = {}
    for item in items:
        _add(messages, item, texts)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # it has thought, and said nothing
    return messages


Content = str | list[dict[str, Any]]


def _add(messages: list[dict[str, Any]], item: Item, texts: dict[int, Content]) -> None:
    """`texts`: contents by the identity of their items, which live on: one that is referred to many times is put
    together once."""
    kind = item["type"]
    if kind == "message":
        _add_message(messages, item["role"], _once(item, "content", texts))
    elif kind == "reasoning":
        thought = _once(item, "content", texts)
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    elif kind in (compaction.KIND, compaction.TRIGGER):
        messages.append(compaction.message_of(item))
    elif kind in _CALLS:
        member, content = _CALLS[kind]
        name = qualified(item.get("namespace", ""), item["name"])
        called = {"name": name, content: item[content]}
        call = {"id": item["call_id"], "type": member, member: called}
        _turn_of_assistant(messages)["tool_calls"].append(call)
    elif kind in OUTPUTS:
        output = _once(item, "output", texts)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})


# Type and content of a call in a chat.
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}


def _once(item: Item, name: str, texts: dict[int, Content]) -> Content:
    content = texts.get(id(item))
    if content is None:
        content = texts[id(item)] = _content_of(item.get(name) or "")
    return content


def _content_of(content: str | Sequence[Item]) -> Content:
    """A message's content for a chat: one text, unless there are files among its parts."""
    if isinstance(content, str) or all("text" in part and _BREAKPOINT not in part for part in content):
        return text_of(content)
    return [_chat_part(part) for part in content]


_BREAKPOINT = "prompt_cache_breakpoint"


def _chat_part(part: Item) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": "text", "text": part.get("text")}
    if "text" not in part:
        shown = {"type": "file", "file": {name: part[name] for name in _OF_FILES[1:] if name in part}}
    return shown | {name: part[name] for name in (_BREAKPOINT,) if name in part}


def _add_message(messages: list[dict[str, Any]], role: str, text: Content) -> None:
    """The answer behind a thought is the same turn."""
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
    return [index for index in range(1, len(items)) if items[index]["type"] not in OUTPUTS]

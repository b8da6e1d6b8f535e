"""The output item that is being written: a message, reasoning, or a function call. Pure.

Each says by which events it begins, goes on and is done; numbers and the item's index are its owner's to add.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.responses.items import Item, output_id
from services.gateway.responses.shape import (
    ItemStatus,
    call_item,
    message_item,
    reasoning_item,
    text_part,
)

News = tuple[str, dict[str, Any]]
"""An event's type and body."""


class Writing(Protocol):
    """An item that is not done."""

    @property
    def kind(self) -> str:
        """The type of the item."""
        ...

    def item(self, status: ItemStatus) -> Item:
        """As far as it has come."""
        ...

    def begin(self) -> list[News]: ...

    def done(self) -> list[News]:
        """What comes before `response.output_item.done`."""
        ...


class MessageWriting:
    """A message of one part."""

    kind = "message"

    def __init__(self, identity: str, index: int) -> None:
        self._id = output_id("message", identity, index)
        self._text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def item(self, status: ItemStatus) -> Item:
        return message_item(self._id, status, [self._part()])

    def begin(self) -> list[News]:
        added = message_item(self._id, "in_progress", [])
        return [
            ("response.output_item.added", {"item": added}),
            ("response.content_part.added", self._in_part(part=text_part("", []))),
        ]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[News]:
        self._text.append(text)
        self.logprobs += logprobs
        return [("response.output_text.delta", self._in_part(delta=text, logprobs=list(logprobs)))]

    def done(self) -> list[News]:
        part = self._part()
        return [
            ("response.output_text.done", self._in_part(text=part["text"], logprobs=part["logprobs"])),
            ("response.content_part.done", self._in_part(part=part)),
        ]

    def _part(self) -> Item:
        return text_part("".join(self._text), self.logprobs)

    def _in_part(self, **body: Any) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0, **body}


class ReasoningWriting:
    """What the model thinks before it answers."""

    kind = "reasoning"

    def __init__(self, identity: str, index: int) -> None:
        self._id = output_id("reasoning", identity, index)
        self._text: list[str] = []

    def item(self, status: ItemStatus) -> Item:
        return reasoning_item(self._id, status, [self._part()])

    def begin(self) -> list[News]:
        added = reasoning_item(self._id, "in_progress", [])
        return [
            ("response.output_item.added", {"item": added}),
            ("response.content_part.added", self._in_part(part={"type": "reasoning_text", "text": ""})),
        ]

    def add(self, text: str) -> list[News]:
        self._text.append(text)
        return [("response.reasoning_text.delta", self._in_part(delta=text))]

    def done(self) -> list[News]:
        part = self._part()
        return [
            ("response.reasoning_text.done", self._in_part(text=part["text"])),
            ("response.content_part.done", self._in_part(part=part)),
        ]

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": "".join(self._text)}

    def _in_part(self, **body: Any) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0, **body}


class CallWriting:
    """A function call."""

    kind = "function_call"

    def __init__(self, identity: str, index: int, call_id: str, name: str) -> None:
        self._id = output_id("function_call", identity, index)
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def item(self, status: ItemStatus) -> Item:
        return call_item(self._id, status, self._call_id, self._name, "".join(self._arguments))

    def begin(self) -> list[News]:
        return [("response.output_item.added", {"item": self.item("in_progress")})]

    def add(self, arguments: str) -> list[News]:
        self._arguments.append(arguments)
        return [("response.function_call_arguments.delta", {"item_id": self._id, "delta": arguments})]

    def done(self) -> list[News]:
        body = {"item_id": self._id, "name": self._name, "arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", body)]

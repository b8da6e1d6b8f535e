"""The response object and its items as JSON values, and the item that is being written: message, reasoning or call.
Pure.

An item says by which events it begins, goes on and is done; numbers and the item's index are its owner's to add.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from services.gateway.streams.formats import Usage
from services.gateway.streams.output import ScoredToken
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages.records import GenerationRecord

Item = dict[str, Any]
"""As it is listed: JSON."""


ABBREVIATIONS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def output_id(kind: str, identity: str, index: int) -> str:
    return f"{ABBREVIATIONS[kind]}_{identity}_{index}"


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

INCOMPLETE = {"length": "max_output_tokens"}
"""Why a response is incomplete, by the finish reason of its generation."""


class ResponseShape:
    """What is the same in every sight of one response."""

    def __init__(self, record: GenerationRecord, tokenizer: Tokenizer) -> None:
        assert record.response is not None, "it is of the endpoint responses"
        self.identity = record.identity
        self.background = record.response.background
        self._record = record
        self._shown: dict[str, Any] = msgspec.json.decode(record.response.shown)
        self._tokenizer = tokenizer

    def response(
        self,
        status: Status,
        output: Sequence[Item],
        usage: Usage | None = None,
        reasoning_tokens: int = 0,
        *,
        incomplete: str | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The whole object. It has no `completed_at`: a log has positions and no times."""
        record = self._record
        return {
            "id": f"resp_{record.identity}",
            "object": "response",
            "created_at": int(record.created),
            "status": status,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "model": record.requests[0].model,
            "output": list(output),
            "usage": _usage(usage, reasoning_tokens) if usage else None,
            **self._shown,
        }

    def logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        return [
            self._token(item.token, item.known.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in item.known.top]}
            for item in scored
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(item_id: str, status: ItemStatus, parts: Sequence[Item]) -> Item:
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(parts),
    }


def call_item(item_id: str, status: ItemStatus, call_id: str, name: str, arguments: str) -> Item:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def reasoning_item(item_id: str, status: ItemStatus, parts: Sequence[Item]) -> Item:
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": list(parts)}


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    cached = usage.prompt_tokens_details["cached_tokens"]
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


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

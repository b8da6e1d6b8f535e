"""The response object and its items as JSON values, and the item that is being written: message, reasoning or call.
Pure.

An item says by which events it begins, goes on and is done; numbers and the item's index are its owner's to add.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from services.gateway.streams.formats import Usage
from services.gateway.streams.output import ScoredToken
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages.records import GenerationRecord

Item = dict[str, Any]
"""As it is listed: JSON."""


ABBREVIATIONS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

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
            "model": record.model_shown,
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


class Writing:
    """An item that is not done."""

    kind: ClassVar[str]
    """The type of the item."""

    def __init__(self, identity: str, index: int) -> None:
        self._id = f"{ABBREVIATIONS[self.kind]}_{identity}_{index}"
        self._text: list[str] = []

    def item(self, status: ItemStatus) -> Item:
        """As far as it has come."""
        raise NotImplementedError

    def begin(self) -> list[News]:
        raise NotImplementedError

    def done(self) -> list[News]:
        """What comes before `response.output_item.done`."""
        raise NotImplementedError


class PartWriting(Writing):
    """An item of one part, which is text."""

    part_kind: ClassVar[str]

    def item(self, status: ItemStatus) -> Item:
        return self._item(status, [self._part()])

    def begin(self) -> list[News]:
        return [
            ("response.output_item.added", {"item": self._item("in_progress", [])}),
            ("response.content_part.added", self._in_part(part=self._part())),
        ]

    def done(self) -> list[News]:
        part = self._part()
        said = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            (f"response.{self.part_kind}.done", self._in_part(**said)),
            ("response.content_part.done", self._in_part(part=part)),
        ]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        raise NotImplementedError

    def _part(self) -> Item:
        return {"type": self.part_kind, "text": "".join(self._text)}

    def _in_part(self, **body: Any) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0, **body}


class ReasoningWriting(PartWriting):
    """What the model thinks before it answers."""

    kind, part_kind = "reasoning", "reasoning_text"

    def add(self, text: str) -> list[News]:
        self._text.append(text)
        return [("response.reasoning_text.delta", self._in_part(delta=text))]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": list(parts)}


class MessageWriting(PartWriting):
    """A message, whose text may have log probabilities."""

    kind, part_kind = "message", "output_text"

    def __init__(self, identity: str, index: int) -> None:
        super().__init__(identity, index)
        self.logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[News]:
        self._text.append(text)
        self.logprobs += logprobs
        return [("response.output_text.delta", self._in_part(delta=text, logprobs=list(logprobs)))]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        return {
            "id": self._id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": list(parts),
        }

    def _part(self) -> Item:
        return super()._part() | {"annotations": [], "logprobs": list(self.logprobs)}


class CallWriting(Writing):
    """A function call."""

    kind = "function_call"

    def __init__(self, identity: str, index: int, call_id: str, name: str) -> None:
        super().__init__(identity, index)
        self._call_id = call_id
        self._name = name

    def item(self, status: ItemStatus) -> Item:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._text),
        }

    def begin(self) -> list[News]:
        return [("response.output_item.added", {"item": self.item("in_progress")})]

    def add(self, arguments: str) -> list[News]:
        self._text.append(arguments)
        return [("response.function_call_arguments.delta", {"item_id": self._id, "delta": arguments})]

    def done(self) -> list[News]:
        body = {"item_id": self._id, "name": self._name, "arguments": "".join(self._text)}
        return [("response.function_call_arguments.done", body)]

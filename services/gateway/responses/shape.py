"""The response object and its items as JSON values. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.gateway.responses.items import Item
from services.gateway.text.formats import Usage
from services.gateway.text.text_output import ScoredToken
from services.gateway.text.tokenization import Tokenizer
from shared.messages.records import GenerationRecord

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

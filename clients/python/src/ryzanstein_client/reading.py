"""The reading of one generation across any number of connections: what to ask next, what has come. No I/O.

POST path, Idempotency-Key ──▶ chunk: its id, event: its position
      │ lost before the first event                  │ lost
      └─▶ the same again: one generation             └─▶ GET /v1/generations/{id}/stream, Last-Event-ID: position
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ryzanstein_client.cursor import Cursor
from ryzanstein_client.errors import error_from
from ryzanstein_client.types import Piece


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None


class Reading:
    """From a request, or from where somebody else stood."""

    def __init__(self, begin: Ask | None, cursor: Cursor | None = None) -> None:
        """`begin` may be left out where a cursor is given."""
        assert begin is not None or cursor is not None, "there is nothing to read"
        self._begin = begin
        self.cursor = cursor
        self.done = False

    def ask(self) -> Ask:
        """The request that continues the stream behind what has been taken."""
        if self.cursor is None:
            assert self._begin is not None
            return self._begin
        headers = {"Last-Event-ID": self.cursor.position} if self.cursor.position else {}
        return Ask("GET", f"/v1/generations/{quote(self.cursor.generation, safe='')}/stream", headers)

    def take(self, data: str, identity: str) -> Piece | None:
        """One whole event; None: it has nothing for the caller. Raises `ApiError` for one that is an error."""
        if not data:
            return None
        if data == "[DONE]":
            self.done = True
            return None
        chunk = json.loads(data)
        if chunk.get("error"):
            raise error_from(chunk["error"])
        self.cursor = Cursor(chunk["id"], identity)
        choice = (chunk.get("choices") or [{}])[0]  # one at most, as OpenAI has it
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return Piece(text, identity, choice.get("index", 0), choice.get("finish_reason"), chunk)

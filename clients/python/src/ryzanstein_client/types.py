"""What callers get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a stream."""

    text: str
    """What it adds to the answer of its choice; empty where it says something else."""
    position: str
    """Where a reader stands who has it: what `attach` takes as `after`."""
    choice: int
    finish_reason: str | None
    """`stop`, `length`, `tool_calls`, ... on the last piece of a choice."""
    chunk: Mapping[str, Any]
    """OpenAI's chunk: tool calls, log probabilities, usage."""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    index: int
    """Of the document in the request."""
    relevance_score: float
    text: str | None
    """None with `return_documents=False`."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents by how well they answer a query."""

    results: Sequence[RankedDocument]
    """The best first."""
    raw: Mapping[str, Any]
    """The endpoint's answer: the model, usage."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How far a session's prompt is computed ahead of its next request."""

    status: Literal["in_progress", "completed", "cancelled"]
    """`cancelled`: a longer conversation of the session has taken its place."""
    prompt_tokens: int
    cached_tokens: int | None
    """Of these, those that were there; None while it is not completed."""
    computed_tokens: int | None
    raw: Mapping[str, Any]
    """The endpoint's answer: the id of the generation, the model."""


@dataclass(frozen=True, slots=True)
class GenerationState:
    """What has come of a generation."""

    id: str
    model: str
    status: Status
    position: str
    """`attach(id, after=position)` goes on behind `response`."""
    response: Mapping[str, Any] | None
    """The endpoint's response, as far as it has come."""
    error: Mapping[str, Any] | None

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")

    @property
    def text(self) -> str:
        """Of the first choice, as far as it has come."""
        choices = (self.response or {}).get("choices") or [{}]
        message = choices[0].get("message") or {}
        return str(message.get("content") or choices[0].get("text") or "")

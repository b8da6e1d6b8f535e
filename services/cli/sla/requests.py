"""One client's request as the journal shows it: its record and the entries of its choices. Pure.

record ─────────────┐  either may come first
entry, entry, ... ──┴▶ first token, gaps, failovers ──▶ an end of every choice ──▶ how the request ended
"""

from typing import Literal

from shared.messages import TokenEntry
from shared.messages.records import GenerationRecord

End = Literal["completed", "failed", "refused", "cancelled"]

CLIENTS_FAULT = frozenset(
    (
        "invalid_request",
        "model_not_found",
        "context_length_exceeded",
        "invalid_grammar",
        "payload_too_large",
        "rate_limit_exceeded",
        "queue_full",
    )
)
"""Codes (`shared.errors`) that a gateway answers with 4xx: nothing of ours failed."""


class Choice:
    """One generation. Attempts are fenced as a gateway does: an older one than the newest says nothing."""

    __slots__ = ("attempt", "cached", "end", "last_at", "moved", "position")

    def __init__(self) -> None:
        self.attempt = 0
        self.position = 0
        """Output tokens so far."""
        self.cached = 0
        self.last_at = 0.0
        """When its last tokens came."""
        self.moved = False
        """Whether a newer attempt has begun and nothing of it has come."""
        self.end: End | None = None

    def take(self, group: str, entry: TokenEntry) -> bool:
        """Whether the entry is news: tokens behind those that are known, or the end."""
        if self.end is not None or entry.attempt < self.attempt:
            return False
        if entry.attempt > self.attempt:
            self.attempt, self.moved = entry.attempt, bool(self.position)
        self.cached = max(self.cached, entry.cached_tokens)
        reached = entry.position + len(entry.tokens)
        fresh = reached > self.position or bool(entry.vector)
        self.position = max(self.position, reached)
        if entry.finish and not (entry.finish == "error" and entry.retryable and group):
            self.end = _end(entry)  # else another ring goes on with it
            return True
        return fresh


def _end(entry: TokenEntry) -> End:
    if entry.finish == "error":
        return "refused" if entry.error_code in CLIENTS_FAULT else "failed"
    return "cancelled" if entry.finish == "cancelled" else "completed"


class Request:
    """A record's choices."""

    __slots__ = ("batch", "began", "choices", "expected", "first_at", "heard_at", "model", "prompt", "stops")

    def __init__(self, at: float) -> None:
        self.began = self.heard_at = at
        self.model = ""
        """Empty until the record has come."""
        self.batch = False
        self.stops = False
        """Whether its text may end before its tokens do: the gateway cancels the rest."""
        self.prompt = 0
        self.expected = 0
        """Choices in all; 0: not known yet."""
        self.first_at: float | None = None
        self.choices: dict[str, Choice] = {}

    def describe(self, record: GenerationRecord, at: float) -> None:
        """The record, or a part of it, was stored at `at`.

        It began when the gateway took it; a gateway whose clock is ahead of the broker's does not shorten it.
        """
        self.began = min(record.created, at, self.began)
        first = record.outline or record.requests[0]
        self.model, self.batch = first.model, first.lane == "batch"
        self.stops = bool(record.stop)
        self.prompt += record.prompt_tokens + sum(len(request.prompt) for request in record.requests)
        self.expected = record.prompts * record.choices

    def choice(self, number: str) -> Choice:
        known = self.choices.get(number)
        if known is None:
            known = self.choices[number] = Choice()
        return known

    @property
    def output(self) -> int:
        return sum(choice.position for choice in self.choices.values())

    @property
    def cached(self) -> int:
        return max((choice.cached for choice in self.choices.values()), default=0)

    @property
    def end(self) -> End | None:
        """None while a choice goes on, or while its record is missing."""
        ends = [choice.end for choice in self.choices.values() if choice.end is not None]
        if not self.expected or len(ends) < self.expected:
            return None
        if "failed" in ends:
            return "failed"
        if "refused" in ends:
            return "refused"
        if "cancelled" in ends and not (self.stops and self.output):
            return "cancelled"
        return "completed"

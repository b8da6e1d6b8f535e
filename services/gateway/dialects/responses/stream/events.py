"""From what a model says to the numbered events of a response. Pure.

    token     0          1        2            3           (end)
    events    2 item     5 delta  (no text)    6 delta      7 text done
              3 part                                        8 part done
              4 delta                                       9 item done
                                                           10 completed
    before:   0 created  1 in_progress          (in the background: 1 queued, and 2 in_progress with token 0)

Invariant: the events are a function of the log alone. Each token is taken by itself, however the frames were cut
that brought it, and adds at most one delta to a part; so event n is the same event for every reader on every
gateway, and `starting_after` n goes on exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from services.gateway.dialects.responses.stream.items import (
    INCOMPLETE,
    CallWriting,
    CompactionWriting,
    CustomCallWriting,
    Item,
    ItemStatus,
    MessageWriting,
    News,
    ReasoningWriting,
    ResponseShape,
    Status,
    Writing,
)
from services.gateway.streams.formats import Usage
from services.gateway.streams.output import ScoredToken

WritingT = TypeVar("WritingT", bound=Writing)


class ResponseStreamEvent(NamedTuple):
    """An event; its number and type are shown with its body."""

    number: int
    type: str
    body: dict[str, Any]


class ResponseEvents:
    """One response, from its beginning."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self.silent = shape.prewarm  # whether nothing of what the model says is shown
        self._events: list[ResponseStreamEvent] = []
        self.count = 0  # events so far
        self.reasoning_tokens = 0  # output tokens up to the last one of the reasoning
        self._output: list[Item] = []  # items that are done
        self._writing: Writing | None = None
        self._scored: list[dict[str, Any]] = []  # scored tokens whose text is still held back
        self._begun = False
        self._final: dict[str, Any] | None = None

    def take(self) -> list[ResponseStreamEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    # --- what happens ----------------------------------------------------------------------------

    def created(self) -> None:
        """What comes before any token."""
        if not self._shape.background:
            self._lifecycle("response.created", "in_progress")
            self.begin()
            return
        self._lifecycle("response.created", "queued")
        self._lifecycle("response.queued", "queued")

    def begin(self) -> None:
        """The first token has come, or an end."""
        if not self._begun:
            self._begun = True
            self._lifecycle("response.in_progress", "in_progress")

    def reasoning(self, text: str) -> None:
        """What one token adds to the reasoning, perhaps nothing."""
        if text:
            self._add(self._written(ReasoningWriting).add(text))

    def text(self, text: str, scored: Sequence[ScoredToken] = ()) -> None:
        """What one token adds to the message, perhaps nothing."""
        self._scored += self._shape.logprobs(scored)
        if text and self._shape.compacts:
            self._add(self._written(CompactionWriting).add(text))
        elif text:
            logprobs, self._scored = self._scored, []
            self._add(self._written(MessageWriting).add(text, logprobs))

    def call(self, call_id: str, name: str, *, custom: bool = False) -> None:
        """A call of a function, or of a custom tool, begins."""
        kind = CustomCallWriting if custom else CallWriting
        namespace, name = self._shape.named(name)
        self._begin(kind(self._shape, self._next_index(), call_id, name, namespace))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that is being written."""
        if text:
            assert isinstance(self._writing, CallWriting), "a call has begun"
            self._add(self._writing.add(text))

    def finish(self, reason: str, usage: Usage) -> None:
        """The model has ended. An answer without any item is an empty message; an empty summary is none."""
        shape = self._shape
        incomplete = None if shape.prewarm else INCOMPLETE.get(reason)
        if not (self._output or self._writing or shape.compacts or shape.prewarm):
            self._written(MessageWriting)
        status: ItemStatus = "incomplete" if incomplete else "completed"
        self._close(status)
        self._end(f"response.{status}", status, usage, incomplete=incomplete)

    def cancel(self, usage: Usage) -> None:
        """Somebody has cancelled it. OpenAI has no event of that name; the status in the object says it."""
        self._break_off()
        self._end("response.incomplete", "cancelled", usage)

    def fail(self, error: dict[str, str], usage: Usage) -> None:
        """It has ended with an error."""
        self._break_off()
        self._end("response.failed", "failed", usage, error=error)

    def response(self) -> dict[str, Any]:
        """The object as far as it has come."""
        if self._final is not None:
            return self._final
        output = list(self._output)
        if self._writing is not None:
            output.append(self._writing.item("in_progress"))
        return self._shape.response("in_progress" if self._begun else "queued", output)

    # --- inside ----------------------------------------------------------------------------------

    def _written(self, kind: type[WritingT]) -> WritingT:
        """The item of that kind that is being written; it begins now where there is none."""
        if isinstance(self._writing, kind):
            return self._writing
        writing = kind(self._shape, self._next_index())
        self._begin(writing)
        return writing

    def _break_off(self) -> None:
        """What was being written stays as far as it has come; but half a summary must not stand for a conversation."""
        if isinstance(self._writing, CompactionWriting):
            self._writing = None
        self._close("incomplete")

    def _next_index(self) -> int:
        """The index of an item that begins now."""
        return len(self._output) + (self._writing is not None)

    def _begin(self, writing: Writing) -> None:
        """What was being written is done."""
        self._close("completed")
        self._writing = writing
        self._add(writing.begin())

    def _close(self, status: ItemStatus) -> None:
        writing = self._writing
        if writing is None:
            return
        if isinstance(writing, MessageWriting):
            writing.logprobs += self._scored
            self._scored = []
        item = writing.item(status)
        self._add([*writing.done(), ("response.output_item.done", {"item": item})])
        self._output.append(item)
        self._writing = None

    def _end(
        self,
        kind: str,
        status: Status,
        usage: Usage,
        *,
        incomplete: str | None = None,
        error: dict[str, str] | None = None,
    ) -> None:
        self._final = self._shape.response(
            status, self._output, usage, self.reasoning_tokens, incomplete=incomplete, error=error
        )
        self._number(kind, {"response": self._final})

    def _lifecycle(self, kind: str, status: Status) -> None:
        self._number(kind, {"response": self._shape.response(status, [])})

    def _add(self, news: Sequence[News]) -> None:
        """Events of the item that is being written."""
        for kind, body in news:
            self._number(kind, {"output_index": len(self._output), **body})

    def _number(self, kind: str, body: dict[str, Any]) -> None:
        self._events.append(ResponseStreamEvent(self.count, kind, body))
        self.count += 1

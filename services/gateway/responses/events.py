"""From what a model says to the numbered events of a response. Pure.

    token     0          1        2            3           (end)
    events    3 added    6 delta  (no text)    7 delta     8 text done
              4 part                                       9 part done
              5 delta                                     10 item done
                                                          11 completed
    before:   0 created  1 in_progress          (in the background: 1 queued, 2 in_progress)

Invariant: the events are a function of the log alone. What one token adds to the text is at most one delta,
and each token is taken by itself, however the frames were cut that brought it; so event n is the same event
for every reader on every gateway, and `starting_after` n goes on exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from services.gateway.formats import Usage
from services.gateway.responses.items import Item, output_id
from services.gateway.responses.shape import (
    INCOMPLETE,
    ItemStatus,
    ResponseShape,
    Status,
    call_item,
    message_item,
    text_part,
)
from services.gateway.text_output import ScoredToken


class Event(NamedTuple):
    """An event; its number and type are shown with its body."""

    number: int
    type: str
    body: dict[str, Any]


class _Message:
    """The message that is being written."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def part(self) -> Item:
        return text_part("".join(self.text), self.logprobs)

    def item(self, status: ItemStatus) -> Item:
        return message_item(self.id, status, [self.part()])


class _Call:
    """The function call that is being written."""

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self.id = item_id
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []

    def item(self, status: ItemStatus) -> Item:
        return call_item(self.id, status, self.call_id, self.name, "".join(self.arguments))


class ResponseEvents:
    """One response, from its beginning. Every method returns the events that it adds."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._number = 0
        self._events: list[Event] = []
        self._output: list[Item] = []
        """Items that are done."""
        self._open: _Message | _Call | None = None
        self._scored: list[dict[str, Any]] = []
        """Scored tokens whose text is still held back."""
        self._begun = False
        self._final: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """Events so far."""
        return self._number

    # --- what happens ----------------------------------------------------------------------------

    def created(self) -> list[Event]:
        """What comes before any token."""
        if not self._shape.background:
            self._lifecycle("response.created", "in_progress")
            return self.begin()
        self._lifecycle("response.created", "queued")
        self._lifecycle("response.queued", "queued")
        return self._take()

    def begin(self) -> list[Event]:
        """The first token has come, or an end."""
        if not self._begun:
            self._begun = True
            self._lifecycle("response.in_progress", "in_progress")
        return self._take()

    def text(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        """What one token adds to the message, perhaps nothing."""
        self._scored += self._shape.logprobs(scored)
        if text:
            message = self._message()
            logprobs, self._scored = self._scored, []
            message.text.append(text)
            message.logprobs += logprobs
            self._add(
                "response.output_text.delta",
                item_id=message.id,
                output_index=len(self._output),
                content_index=0,
                delta=text,
                logprobs=logprobs,
            )
        return self._take()

    def call(self, call_id: str, name: str) -> list[Event]:
        """A function call begins; what was being written is done."""
        self._close("completed")
        item_id = output_id("function_call", self._shape.identity, len(self._output))
        self._open = _Call(item_id, call_id, name)
        self._add_item("response.output_item.added", self._open.item("in_progress"))
        return self._take()

    def arguments(self, delta: str) -> list[Event]:
        """More of the arguments of the call that is being written."""
        call = self._open
        assert isinstance(call, _Call), "a call has begun"
        if delta:
            call.arguments.append(delta)
            self._add(
                "response.function_call_arguments.delta",
                item_id=call.id,
                output_index=len(self._output),
                delta=delta,
            )
        return self._take()

    def finish(self, reason: str, usage: Usage) -> list[Event]:
        """The model has ended; a message that says nothing is said where there is no other item."""
        incomplete = INCOMPLETE.get(reason)
        if not self._output and self._open is None:
            self._message()
        status: Status = "incomplete" if incomplete else "completed"
        self._close("incomplete" if incomplete else "completed")
        return self._end(f"response.{status}", status, usage, incomplete=incomplete)

    def cancel(self, usage: Usage) -> list[Event]:
        """Somebody has cancelled it. OpenAI has no event of that name; the status in the object says it."""
        self._close("incomplete")
        return self._end("response.incomplete", "cancelled", usage)

    def fail(self, error: dict[str, str], usage: Usage) -> list[Event]:
        """It has ended with an error."""
        self._close("incomplete")
        return self._end("response.failed", "failed", usage, error=error)

    def response(self) -> dict[str, Any]:
        """The object as far as it has come."""
        if self._final is not None:
            return self._final
        output = self._output if self._open is None else [*self._output, self._open.item("in_progress")]
        return self._shape.response("in_progress" if self._begun else "queued", output)

    # --- inside ----------------------------------------------------------------------------------

    def _message(self) -> _Message:
        """The message that is being written; it begins now where there is none."""
        if isinstance(self._open, _Message):
            return self._open
        self._close("completed")
        item_id = output_id("message", self._shape.identity, len(self._output))
        self._open = message = _Message(item_id)
        self._add_item("response.output_item.added", message_item(item_id, "in_progress", []))
        self._add_part("response.content_part.added", message)
        return message

    def _close(self, status: ItemStatus) -> None:
        """What is being written is done."""
        item, index = self._open, len(self._output)
        if item is None:
            return
        if isinstance(item, _Message):
            item.logprobs += self._scored
            self._scored = []
            part = item.part()
            self._add(
                "response.output_text.done",
                item_id=item.id,
                output_index=index,
                content_index=0,
                text=part["text"],
                logprobs=part["logprobs"],
            )
            self._add_part("response.content_part.done", item)
        else:
            self._add(
                "response.function_call_arguments.done",
                item_id=item.id,
                output_index=index,
                name=item.name,
                arguments="".join(item.arguments),
            )
        shown = item.item(status)
        self._add_item("response.output_item.done", shown)
        self._output.append(shown)
        self._open = None

    def _end(
        self,
        kind: str,
        status: Status,
        usage: Usage,
        *,
        incomplete: str | None = None,
        error: dict[str, str] | None = None,
    ) -> list[Event]:
        self._final = self._shape.response(status, self._output, usage, incomplete=incomplete, error=error)
        self._add(kind, response=self._final)
        return self._take()

    def _lifecycle(self, kind: str, status: Status) -> None:
        self._add(kind, response=self._shape.response(status, []))

    def _add_item(self, kind: str, item: Item) -> None:
        self._add(kind, output_index=len(self._output), item=item)

    def _add_part(self, kind: str, message: _Message) -> None:
        self._add(
            kind, item_id=message.id, output_index=len(self._output), content_index=0, part=message.part()
        )

    def _add(self, kind: str, **body: Any) -> None:
        self._events.append(Event(self._number, kind, body))
        self._number += 1

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

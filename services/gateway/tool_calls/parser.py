"""Text of one choice in, events out, and their calls numbered: reasoning first, then ordinary text and calls. Pure.

    text ──▶ reasoning ──▶ tool calls ──▶ events
                  └──────── thoughts ───────▲

Reasoning stands before the answer: `<think>...</think>`, or `[THINK]...[/THINK]`.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from services.gateway.tool_calls.parsers.scanner import (
    Arguments,
    Begin,
    Event,
    Machine,
    Scanner,
    Steps,
    Text,
    Types,
)

MARKERS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Begin and end of the reasoning, by the parser's name."""


def reasoning(scan: Scanner, name: str, *, opened: bool) -> Steps[None]:
    """The thoughts, then everything else as text; white space between them belongs to neither."""
    begin, end = MARKERS[name]
    scan.mark()
    if (yield from scan.optional(begin)) or opened:
        thoughts = _Thoughts(scan)
        if not (yield from scan.until((end,), thoughts.feed)):
            return
        yield from scan.spaces()
    yield from scan.rest()


class _Thoughts:
    """White space at either end is no thought."""

    def __init__(self, scan: Scanner) -> None:
        self._scan = scan
        self._space = ""
        self._begun = False

    def feed(self, text: str) -> None:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        self._scan.thought(shown)


class _Stage:
    """One parser at work."""

    def __init__(self, scan: Scanner, steps: Steps[None]) -> None:
        self._scan = scan
        self._steps = steps
        self._done = False

    def feed(self, text: str, *, last: bool) -> list[Event]:
        self._scan.add(text)
        if last:
            self._scan.end()
        if not self._done:
            try:
                next(self._steps)
            except StopIteration:
                self._done = True
        if last:
            self._scan.last_space()
        return self._scan.take()


class Parser:
    """The same text gives the same events, joined, however it is cut into pieces."""

    def __init__(
        self, machine: Machine | None, types: Types, *, thinking: str = "", opened: bool = False
    ) -> None:
        """`machine` None: calls are not looked for; `thinking` "": reasoning is not. `opened`: it begins within
        its reasoning."""
        self._stages: list[_Stage] = []
        if thinking:
            scan = Scanner()
            self._stages.append(_Stage(scan, reasoning(scan, thinking, opened=opened)))
        if machine is not None:
            scan = Scanner()
            self._stages.append(_Stage(scan, machine(scan, types)))

    def feed(self, text: str) -> list[Event]:
        """What has become clear with `text`."""
        return self._run([Text(text)] if text else [], last=False)

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        return self._run([], last=True)

    def _run(self, events: Sequence[Event], *, last: bool) -> list[Event]:
        for stage in self._stages:
            texts = "".join(event.text for event in events if isinstance(event, Text))
            others = [event for event in events if not isinstance(event, Text)]
            events = others + stage.feed(texts, last=last) if texts or last else others
        return list(events)


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one call: its name, with its id, or more of its arguments, or both."""

    index: int
    id: str
    """Empty where the call has begun before, as the name is."""
    name: str
    arguments: str


def call_id(generation_id: str, index: int) -> str:
    """The id of call `index` of a choice. It follows from the generation alone: whoever shows the answer again
    shows the same."""
    digest = hashlib.blake2b(f"{generation_id}#{index}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


class CallNumbering:
    """Gives the calls of one choice their indices and ids."""

    def __init__(self, generation_id: str, *, single: bool) -> None:
        """`single`: only the first call counts."""
        self._generation_id = generation_id
        self._single = single
        self.begun = 0
        """Calls so far, those left out included."""

    def deltas(self, events: Sequence[Event]) -> list[CallDelta]:
        """What `events` mean for clients, one delta a call."""
        found: dict[int, CallDelta] = {}
        for event in events:
            if isinstance(event, Begin):
                index, self.begun = self.begun, self.begun + 1
                found[index] = CallDelta(index, call_id(self._generation_id, index), event.name, "")
            elif isinstance(event, Arguments):
                index = self.begun - 1
                delta = found.get(index) or CallDelta(index, "", "", "")
                found[index] = msgspec.structs.replace(delta, arguments=delta.arguments + event.text)
        return [delta for delta in found.values() if not (self._single and delta.index)]

"""Text of one choice in, events out: reasoning first, then ordinary text and calls. Pure.

text ──▶ reasoning ──▶ tool calls ──▶ events
              └──────── thoughts ───────▲
"""

from collections.abc import Sequence

from services.gateway.tools.parsers.reasoning import reasoning
from services.gateway.tools.parsers.scanner import Event, Scanner, Steps, Text
from services.gateway.tools.parsers.types import Machine, Types


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

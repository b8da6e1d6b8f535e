"""Reasoning before the answer: `<think>...</think>`, or `[THINK]...[/THINK]`. Pure.

Where the template has opened it already, at the end of the prompt, the answer begins within it.
"""

from services.gateway.tool_calls.parsers.scanner import Scanner, Steps

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

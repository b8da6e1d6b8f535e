"""Calls as a list in Python: `[f(a=1, b="x"), g()]`; Llama 3.2 and 4, LFM2, OLMo 3. Pure.

Each argument is passed on as JSON when it is complete. Without a marker only the name of a tool tells a call from
other text in brackets.
"""

import re

from services.gateway.tool_calls.parsers.scanner import Scanner, Steps, Types
from services.gateway.tool_calls.parsers.values import of_literal, quoted

# What may stand before the list, and behind it.
MARKERS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}

_NAME_END = re.compile(r"[^\w.\-]")
_KEY_END = re.compile(r"\W")
_OUTSIDE = re.compile(r"""[(){}\[\],"']""")
_INSIDE = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def pythonic(scan: Scanner, types: Types) -> Steps[None]:
    scan.mark()
    marker = yield from scan.optional(*MARKERS)
    while True:
        if not (yield from _calls(scan, types, marked=bool(marker))):
            scan.fall_back()
        elif marker:
            yield from scan.optional(MARKERS[marker])
        if not (marker := (yield from scan.content(*MARKERS))):
            return


def _calls(scan: Scanner, types: Types, *, marked: bool) -> Steps[bool]:
    """A list of calls, or behind a marker some one below the other; False when there is none."""
    listed = (yield from scan.spaces()) == "["
    if listed:
        scan.skip()
    elif not marked:
        return False
    found = False
    while (yield from _call(scan, types)):
        found = True
        if not (yield from scan.optional(",")) and listed:
            break
    if found:
        yield from scan.optional("]")
    return found


def _call(scan: Scanner, types: Types) -> Steps[bool]:
    """`name(key=value, ...)`; False when there is none, with nothing found."""
    name = (yield from scan.optional(*(f"{name}(" for name in types)))[:-1]
    if not name:
        return False
    scan.begin(name)
    empty = True
    while (yield from scan.spaces()) not in ("", ")"):
        key = yield from scan.name(_KEY_END)
        if not key or not (yield from scan.optional("=")):
            break
        text = yield from _literal(scan)
        if text is None:
            return True  # the text has ended within it
        scan.arguments(("{" if empty else ", ") + quoted(key) + ": " + of_literal(text))
        empty = False
        yield from scan.optional(",")
    if (yield from scan.peek()):
        yield from scan.optional(")")
        scan.arguments("{}" if empty else "}")
    return True


def _literal(scan: Scanner) -> Steps[str | None]:
    """The text up to the comma or bracket behind a value; None when the text ends before."""
    parts: list[str] = []
    depth = 0
    while True:
        if part := (yield from scan.run(_OUTSIDE)):
            parts.append(part)
            continue
        char = yield from scan.peek()
        if not char:
            return None
        if depth == 0 and char in ",)]}":
            return "".join(parts).strip()
        scan.skip()
        parts.append(char)
        if char in "\"'":
            yield from _quoted(scan, char, parts)
        elif char != ",":
            depth += 1 if char in "([{" else -1


def _quoted(scan: Scanner, quote: str, parts: list[str]) -> Steps[None]:
    """The rest of a string."""
    while char := (yield from scan.peek()):
        if part := (yield from scan.run(_INSIDE[quote])):
            parts.append(part)
            continue
        scan.skip()
        parts.append(char)
        if char == quote:
            return
        if char == "\\" and (escaped := (yield from scan.peek())):
            scan.skip()
            parts.append(escaped)

"""Calls that are JSON: `{"name": ..., "arguments": {...}}`, alone or in a list, with any marker before it. Pure.

The arguments are passed on as the model writes them, character by character, so that clients see them come. What
turns out to be no call before its name is known was ordinary text. Behind the name there is no way back: what the
model leaves unfinished stays unfinished, as in OpenAI's API.
"""

import json
import re
from collections.abc import Callable, Container
from typing import Any

from services.gateway.tool_calls.parsers.scanner import Scanner, Steps

_OUTSIDE = re.compile(r'[{}\[\]"]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_FIELDS = ("name", "arguments", "parameters", "type", "id")
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def call_list(scan: Scanner, known: Container[str] | None = None) -> Steps[bool]:
    """A call or a list of them; False when there is none, with nothing found. `known`: names that make it a call
    where nothing else does; None: the marker before it does."""
    if (yield from scan.spaces()) != "[":
        return (yield from call_object(scan, known))
    scan.skip()
    found = False
    while (yield from call_object(scan, known)):
        found = True
        if (yield from scan.spaces()) != ",":
            break
        scan.skip()
    if found and (yield from scan.peek()) == "]":
        scan.skip()
    return found


def call_object(scan: Scanner, known: Container[str] | None = None) -> Steps[bool]:
    """One call. False when it is none: then nothing was found."""
    if (yield from scan.spaces()) != "{":
        return False
    scan.skip()
    call = _Call(scan, known)
    while True:
        if (yield from scan.spaces()) == "}":
            scan.skip()
            break
        if not (yield from call.field()):
            return call.begun
        if (yield from scan.spaces()) == ",":
            scan.skip()
        elif (yield from scan.peek()) != "}":
            return call.begun
    return call.close()


class _Call:
    """A call as its fields come."""

    def __init__(self, scan: Scanner, known: Container[str] | None) -> None:
        self._scan = scan
        self._known = known
        self._early: list[str] = []  # arguments that came before the name
        self._complete = False
        self.begun = False

    def field(self) -> Steps[bool]:
        """A key and its value; False when that is no part of a call."""
        scan = self._scan
        key = yield from string(scan)
        if key is None or (self._known is not None and not self.begun and key not in _FIELDS):
            return False
        if (yield from scan.spaces()) != ":":
            return False
        scan.skip()
        yield from scan.spaces()
        if key in NAMES and not self.begun:
            return (yield from self._name())
        if key in ARGUMENTS and not self._complete:
            return (yield from self._arguments())
        return (yield from value(scan, _nothing))

    def _name(self) -> Steps[bool]:
        name = yield from string(self._scan)
        if not name or (self._known is not None and name not in self._known):
            return False
        self.begun = True
        self._scan.begin(name)
        self._scan.arguments("".join(self._early))
        return True

    def _arguments(self) -> Steps[bool]:
        self._complete = True
        sink = self._scan.arguments if self.begun else self._early.append
        return (yield from arguments(self._scan, sink))

    def close(self) -> bool:
        if self.begun and not self._complete:
            self._scan.arguments("{}")
        return self.begun


def arguments(scan: Scanner, sink: Callable[[str], Any]) -> Steps[bool]:
    """A call's arguments for `sink`: an object as it stands, the text in a string (some models write their JSON
    twice over), and no arguments as an empty object."""
    char = yield from scan.peek()
    if char == '"':
        text = yield from string(scan)
        sink(text or "")
        return text is not None
    if char and char in "{[":
        return (yield from value(scan, sink))
    parts: list[str] = []
    whole = yield from value(scan, parts.append)
    sink("{}" if "".join(parts) == "null" else "".join(parts))
    return whole


def value(scan: Scanner, sink: Callable[[str], Any]) -> Steps[bool]:
    """Any JSON value for `sink`, as it stands; False when the text ends within it."""
    char = yield from scan.peek()
    if char == '"':
        return (yield from _quoted(scan, sink))
    if char and char in "{[":
        return (yield from _nested(scan, sink))
    found = False
    while part := (yield from scan.run(_SCALAR_END)):
        found = True
        sink(part)
    return found and bool((yield from scan.peek()))


def _nested(scan: Scanner, sink: Callable[[str], Any]) -> Steps[bool]:
    depth = 0
    while True:
        if part := (yield from scan.run(_OUTSIDE)):
            sink(part)
            continue
        char = yield from scan.peek()
        if char == '"':
            if not (yield from _quoted(scan, sink)):
                return False
            continue
        if not char:
            return False
        scan.skip()
        sink(char)
        depth += 1 if char in "{[" else -1
        if not depth:
            return True


def _quoted(scan: Scanner, sink: Callable[[str], Any]) -> Steps[bool]:
    """A string with its quotation marks."""
    scan.skip()
    sink('"')
    while True:
        if part := (yield from scan.run(_INSIDE)):
            sink(part)
            continue
        char = yield from scan.peek()
        if not char:
            return False
        scan.skip()
        if char == '"':
            sink(char)
            return True
        escaped = yield from scan.peek()
        if not escaped:
            sink(char)
            return False
        scan.skip()
        sink(char + escaped)


def string(scan: Scanner) -> Steps[str | None]:
    """The text in a JSON string; None when there is none, or one that is not closed or not JSON."""
    if (yield from scan.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from _quoted(scan, parts.append)):
        return None
    try:
        text: str = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return text


def _nothing(_: str) -> None:
    """For values that nobody reads."""

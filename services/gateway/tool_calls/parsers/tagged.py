"""Calls whose arguments stand in tags: Qwen3-Coder and GLM-4.5. Pure.

    <tool_call>                                     <tool_call>NAME
    <function=NAME>                                 <arg_key>KEY</arg_key>
    <parameter=KEY>                                 <arg_value>VALUE</arg_value>
    VALUE                                           </tool_call>
    </parameter>
    </function>
    </tool_call>

A value has no quotation marks: the type of the parameter says whether `5` is a number or a text. Texts are passed on
as they come; other values when they are complete.
"""

import re

from services.gateway.tool_calls.parsers.marked import END_OF_TOOL_CALL, TOOL_CALL
from services.gateway.tool_calls.parsers.scanner import Scanner, Steps, Types
from services.gateway.tool_calls.parsers.values import TextValue, of_type, quoted

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
ARG_KEY, END_OF_ARG_KEY = "<arg_key>", "</arg_key>"
ARG_VALUE, END_OF_ARG_VALUE = "<arg_value>", "</arg_value>"

_TAG_END = re.compile(r"[>\n]")
_NAME_END = re.compile(r"[<\s]")


class _Object:
    """The arguments' JSON as they come."""

    def __init__(self, scan: Scanner, types: Types, name: str) -> None:
        self._scan = scan
        self._types = types.get(name, {})
        self._empty = True
        scan.begin(name)

    def value(self, key: str, ends: tuple[str, ...], *, trimmed: bool) -> Steps[str]:
        """Reads the value of `key`; returns which of `ends` ended it."""
        scan, types = self._scan, self._types.get(key, "string") or "string"
        scan.arguments(("{" if self._empty else ", ") + quoted(key) + ": ")
        self._empty = False
        if types == "string":
            text = TextValue(scan.arguments, trimmed=trimmed)
            end = yield from scan.until(ends, text.feed)
            text.end(whole=bool(end))
            return end
        parts: list[str] = []
        end = yield from scan.until(ends, parts.append)
        if end:
            scan.arguments(of_type("".join(parts).strip(), types))
        return end

    def close(self) -> None:
        self._scan.arguments("{}" if self._empty else "}")


def qwen3_coder(scan: Scanner, types: Types) -> Steps[None]:
    while marker := (yield from scan.content(TOOL_CALL, FUNCTION)):
        inside = marker == FUNCTION or (yield from scan.optional(FUNCTION))
        name = (yield from scan.name(_TAG_END)) if inside else ""
        if not name.strip() or (yield from scan.peek()) != ">":
            scan.fall_back()
            continue
        scan.skip()
        yield from _parameters(scan, _Object(scan, types, name.strip()))
        yield from scan.optional(END_OF_TOOL_CALL)


def _parameters(scan: Scanner, found: _Object) -> Steps[None]:
    """Up to the end of the function, or to what is no parameter."""
    while (yield from scan.optional(PARAMETER)):
        key = yield from scan.name(_TAG_END)
        if (yield from scan.peek()) != ">":
            break
        scan.skip()
        end = yield from found.value(key.strip(), (END_OF_PARAMETER, END_OF_FUNCTION), trimmed=True)
        if end != END_OF_PARAMETER:
            if end:
                found.close()
            return
    if (yield from scan.spaces()):
        yield from scan.optional(END_OF_FUNCTION)
        found.close()


def glm4(scan: Scanner, types: Types) -> Steps[None]:
    while (yield from scan.content(TOOL_CALL)):
        yield from scan.spaces()
        name = yield from scan.name(_NAME_END)
        yield from scan.spaces()
        if not name or not (yield from scan.starts(ARG_KEY, END_OF_TOOL_CALL)):
            scan.fall_back()
            continue
        yield from _pairs(scan, _Object(scan, types, name))
        yield from scan.optional(END_OF_TOOL_CALL)


def _pairs(scan: Scanner, found: _Object) -> Steps[None]:
    while (yield from scan.optional(ARG_KEY)):
        key: list[str] = []
        yield from scan.until((END_OF_ARG_KEY,), key.append)
        if not (yield from scan.optional(ARG_VALUE)):
            break
        if not (yield from found.value("".join(key).strip(), (END_OF_ARG_VALUE,), trimmed=False)):
            return
    if (yield from scan.spaces()):
        found.close()

"""Gemma's calls: an object whose keys stand without quotation marks, and whose texts stand within markers. Pure.

<start_function_call>call:NAME{city:<escape>Rome<escape>,days:3}<end_function_call>         FunctionGemma
<|tool_call>call:NAME{city:<|"|>Rome<|"|>,days:3}<tool_call|>                               Gemma 4
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.gateway.tool_calls.parsers.json_calls import value as json_value
from services.gateway.tool_calls.parsers.scanner import Machine, Scanner, Steps, Types
from services.gateway.tool_calls.parsers.values import TextValue, of_literal, quoted

_NAME_END = re.compile(r"[{\s<]")
_BARE_END = re.compile(r"[{}\[\],:<\"]")
_CALL = "call:"


class GemmaMarks(NamedTuple):
    """One version's markers."""

    begin: str
    end: str
    text: str  # before and behind a text


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def with_marks(marks: GemmaMarks) -> Machine:
    def machine(scan: Scanner, types: Types) -> Steps[None]:
        while (yield from scan.content(marks.begin)):
            name = ""
            if (yield from scan.optional(_CALL)):
                name = yield from scan.name(_NAME_END)
            if not name or (yield from scan.spaces()) != "{":
                scan.fall_back()
                continue
            scan.begin(name)
            yield from _object(scan, marks, types.get(name, {}))
            yield from scan.optional(marks.end)

    return machine


def _object(scan: Scanner, marks: GemmaMarks, types: Mapping[str, str]) -> Steps[None]:
    """The arguments as JSON: brackets and commas as they are, keys and texts in quotation marks."""
    closers: list[str] = []
    key = ""  # of the argument that is read; its type says what a bare word is
    is_key = False
    while char := (yield from scan.spaces()):
        if (yield from scan.optional(marks.text)):
            yield from _text(scan, marks)
        elif char == '"':
            yield from json_value(scan, scan.arguments)
        elif char in "{[":
            scan.skip()
            scan.arguments(char)
            closers.append("}" if char == "{" else "]")
            is_key = char == "{"
        elif char in "}]":
            scan.skip()
            scan.arguments(closers.pop())
            if not closers:
                return
        elif char in ",:":
            scan.skip()
            scan.arguments(char + " ")
            is_key = char == "," and closers[-1] == "}"
            key = "" if is_key else key
        else:
            word = yield from _word(scan)
            if is_key and len(closers) == 1:
                key = word
            kind = types.get(key, "") if len(closers) == 1 else ""
            scan.arguments(quoted(word) if is_key or kind == "string" else of_literal(word))


def _text(scan: Scanner, marks: GemmaMarks) -> Steps[None]:
    text = TextValue(scan.arguments, trimmed=False)
    text.end(whole=bool((yield from scan.until((marks.text,), text.feed))))


def _word(scan: Scanner) -> Steps[str]:
    """A key, a number, or a text that the model has not marked; one character at least."""
    parts: list[str] = []
    while part := (yield from scan.run(_BARE_END)):
        parts.append(part)
    if not parts:
        parts.append((yield from scan.peek()))
        scan.skip()
    return "".join(parts).strip()


function_gemma = with_marks(FUNCTION_GEMMA)
gemma4 = with_marks(GEMMA4)

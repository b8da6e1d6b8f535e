"""Values that models write without JSON's quotation marks, to JSON by the type of their parameter. Pure."""

import ast
import contextlib
import json
import warnings
from collections.abc import Callable
from typing import Any

from services.gateway.tool_calls.parsers.scanner import TYPE_OF, clean


def to_json(value: Any) -> str:
    """Raises `ValueError`, `TypeError` for what JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(clean(text), ensure_ascii=False)


def of_literal(text: str) -> str:
    """A JSON or Python literal as JSON; anything else as a string."""
    with contextlib.suppress(ValueError, RecursionError):
        return clean(to_json(json.loads(text, parse_constant=_refuse)))
    with (
        contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError),
        warnings.catch_warnings(action="ignore"),  # the compiler's, about the model's way to escape
    ):
        return clean(to_json(ast.literal_eval(text.strip())))
    return quoted(text)


def of_type(text: str, types: str) -> str:
    """`text` as one of `types`, by the first reading that fits; as a string where none does."""
    wanted = types.split("|")
    if "string" in wanted and len(wanted) == 1:
        return quoted(text)
    read = of_literal(text)
    kind = TYPE_OF.get(type(json.loads(read)), "")
    if kind in wanted or (kind == "integer" and "number" in wanted) or "string" not in wanted:
        return read
    return quoted(text)


def _refuse(name: str) -> Any:
    raise ValueError(name)


class TextValue:
    """Makes a JSON string of raw text as it comes. A line break at either end belongs to the notation."""

    def __init__(self, sink: Callable[[str], Any], *, trimmed: bool) -> None:
        self._sink = sink
        self._trimmed = trimmed
        self._held = ""
        self._first = True
        sink('"')

    def feed(self, text: str) -> None:
        if self._trimmed and self._first and text.startswith("\n"):
            text = text[1:]
            self._first = False
            if not text:
                return
        self._first = False
        text = self._held + text
        self._held = "\n" if self._trimmed and text.endswith("\n") else ""
        self._show(text[: len(text) - len(self._held)])

    def end(self, *, whole: bool) -> None:
        """Closes the string, unless the text has ended within it."""
        if whole:
            self._sink('"')

    def _show(self, text: str) -> None:
        self._sink(quoted(text)[1:-1])

r"""The input of a custom tool, out of the JSON in which the model writes it, as it comes. Pure.

    fed        {"input": "print(\"h     i\")"}
    given      print("h                 i")

Models know functions alone, so a custom tool is a function of one text (`schemas.CustomFunction`). A model that writes
anything else than that one text is shown as it writes: nothing of a call is lost.
"""

import json
import re

from services.gateway.tool_calls.parsers.scanner import clean

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')  # what stands before the text
_EXPECTED = '{"input":"'


class CustomInput:
    """One call's input. The same text is given, joined, however what is fed was cut into pieces."""

    def __init__(self) -> None:
        self._state = "before"  # `before` the text, in the `text`, `behind` it; `raw`: it is no such JSON
        self._held = ""

    def feed(self, text: str) -> str:
        """What has become clear of the input."""
        self._held += text
        if self._state == "before":
            self._begin()
        if self._state == "text":
            return self._text()
        if self._state == "raw":
            shown, self._held = self._held, ""
            return shown
        return ""

    def _begin(self) -> None:
        if match := _BEGIN.match(self._held):
            self._state, self._held = "text", self._held[match.end() :]
        elif not _EXPECTED.startswith("".join(self._held.split())):
            self._state = "raw"

    def _text(self) -> str:
        """The characters up to the closing quotation mark; an escape that is not whole is held back."""
        at, held = 0, self._held
        shown: list[str] = []
        while at < len(held):
            char = held[at]
            if char == '"':
                self._state, self._held = "behind", ""
                return "".join(shown)
            if char != "\\":
                shown.append(char)
                at += 1
                continue
            length = _length_of_escape(held, at)
            if length == 0:
                break
            shown.append(_unescaped(held[at : at + length]))
            at += length
        self._held = held[at:]
        return "".join(shown)


def _length_of_escape(text: str, at: int) -> int:
    r"""Of the escape that begins at `at`, both halves of a surrogate pair together; 0: more must come."""
    rest = text[at:]
    if len(rest) < 2:
        return 0
    if rest[1] != "u":
        return 2
    if len(rest) < 6:
        return 0
    if not _is_high(rest[2:6]):
        return 6
    if len(rest) < 12 and "\\u".startswith(rest[6:8]):
        return 0
    return 12 if rest[6:8] == "\\u" else 6


def _is_high(digits: str) -> bool:
    return digits[:1] in "dD" and digits[1:2] in "89abAB"


def _unescaped(escape: str) -> str:
    try:
        return clean(json.loads(f'"{escape}"'))
    except ValueError:
        return escape

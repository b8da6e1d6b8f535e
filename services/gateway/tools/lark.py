"""Pieces of grammars in Lark's notation, as llguidance reads it. Pure."""

import json
import re
from collections.abc import Mapping

Specials = Mapping[str, int]
"""Token ids of the model's special tokens: in a grammar these are no text."""

NOTHING = '""'


def literal(text: str, specials: Specials) -> str:
    """`text` as an expression; special tokens in it stand for themselves."""
    found = [marker for marker in specials if marker in text]
    if not found:
        return _quoted(text)
    pattern = "|".join(re.escape(marker) for marker in sorted(found, key=len, reverse=True))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{specials[part]}]>" if part in specials else _quoted(part) for part in parts)


def regex_of(text: str) -> str:
    """`text` within a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def up_to(end: str, specials: Specials) -> tuple[str, str]:
    """(attributes, body) of a rule for any text up to the first `end`, and that."""
    if end in specials:
        return "", f"/(?s:.*)/ {literal(end, specials)}"
    return "[lazy]", f"/(?s:.*){regex_of(end)}/"


def without(text: str, specials: Specials) -> str:
    """An expression for any text that `text` does not stand in."""
    if text in specials:
        return "/(?s:.*)/"
    return f"/(?s:.*)/ & ~/(?s:.*){regex_of(text)}(?s:.*)/"


def joined(*parts: str) -> str:
    """One after the other, without those that are nothing; not for the alternatives of an expression."""
    return " ".join(part for part in parts if part and part != NOTHING) or NOTHING


class Rules:
    """The rules of a grammar."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str, attributes: str = "") -> str:
        """`name`, for other rules to use."""
        self._rules[name] = f"{name}{attributes}: {body}"
        return name

    def text(self) -> str:
        return "\n".join(self._rules.values()) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

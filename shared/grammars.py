"""From a `Grammar` to what llguidance compiles: the same in gateways, which check it, and in rings, which follow it.

Compiling is code of others on input of strangers. It is bounded (`limits`), but a grammar can still take minutes,
gigabytes or the whole stack, so what is not known yet is compiled in a process of its own first
(`grammar_check.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from shared.messages import Grammar

LARGEST_EXACT = 2**53
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_MOST_OF_REASON = 300
_PICTURE = re.compile(r"^\s*(\^+|\d+ \|.*)$", re.MULTILINE)

# Between JSON's tokens: nothing, a blank, or a line break with an indentation. Left free, white space is what a
# model that has lost its way puts out for ever.
_WHITESPACE = r"( |\n[ \t]{0,40})"
_OPTIONS = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": False, "lenient": False}
"""Over what a schema says of itself under `x-guidance`: a keyword that cannot be held is an error."""


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError where it is none at all."""
    if grammar.kind == "json_schema":
        schema = msgspec.json.decode(grammar.text)  # msgspec's error is a ValueError
        if not isinstance(schema, dict):
            raise ValueError("the schema is not a JSON object")
        if (number := inexact(schema)) is not None:
            raise ValueError(f"{number} in it is a whole number beyond 2^53, which cannot be held exactly")
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_OPTIONS)  # type: ignore[arg-type]
    if grammar.kind == "regex" and grammar.text:
        return LLMatcher.grammar_from_regex(grammar.text)
    if not grammar.text.strip():
        raise ValueError("it is empty")
    return LLMatcher.grammar_from_lark(grammar.text)


def inexact(schema: Any) -> int | None:
    """A number under `const` or `enum` that llguidance, which keeps numbers as doubles, would take for its
    neighbour; None: there is none."""
    level: list[tuple[Any, bool]] = [(schema, False)]
    while level:
        inner: list[tuple[Any, bool]] = []
        for value, named in level:
            if isinstance(value, dict):
                inner += [(item, named or key in ("const", "enum")) for key, item in value.items()]
            elif isinstance(value, list):
                inner += [(item, named) for item in value]
            elif named and isinstance(value, int) and abs(value) > LARGEST_EXACT:
                return value
        level = inner
    return None


def limits() -> LLParserLimits:
    """What compiling and each step may cost: some ten milliseconds and some ten megabytes a sequence."""
    return LLParserLimits(
        max_items_in_row=10_000,  # of a schema, some four for each property that may follow
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


def shortened(reason: str) -> str:
    """llguidance's words for what is wrong, as one line of bounded length, without its pictures of the place."""
    if reason.startswith("NoExtension"):
        return "no token of this model fits"
    line = " ".join(_PICTURE.sub("", reason).replace("<non-verbose/>", "").split()).rstrip(".")
    return line if len(line) <= _MOST_OF_REASON else f"{line[: _MOST_OF_REASON - 3]}..."


def embedded(schema: Mapping[str, Any]) -> str:
    """`schema` as an expression within a grammar in Lark's notation, with the same options."""
    text = msgspec.json.encode({**schema, "x-guidance": _OPTIONS}).decode()
    return "%json " + text.replace("::=", "\\u003a:=")  # else it would look like GBNF (`grammar_check`)

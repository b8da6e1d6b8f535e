"""Text of special tokens in what clients send: it is encoded as the text that it is.

A message that says "<|im_end|>\n<|im_start|>system" must not begin a system message. So each such text is marked before
the conversation is rendered, with a character that occurs nowhere in it, and the prompt is cut at the marks: its pieces
are encoded apart, and none has a special token that the template has not written.

    content    say <|im_end|>         ──▶  say <M|im_end|>
    rendered   <|im_start|>user\nsay <M|im_end|><|im_end|>
    pieces     <|im_start|>user\nsay <     |im_end|><|im_end|>
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from services.gateway.tokenizer.segments import longest_of
from services.gateway.tool_calls.families import FAMILIES
from services.gateway.tool_calls.parser import REASONING

# Code points that are no characters, or private ones: where a client sends one of them, another is taken.
_MARKS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF8F0, 0xF8FF))]
_MARK = re.compile(f"[{''.join(_MARKS)}]")
# How models write calls and reasoning. In what the assistant has said and in instructions they keep their meaning.
_WRITTEN = frozenset(
    (
        *(marker for family in FAMILIES.values() for marker in family.markers),
        *(marker for marks in REASONING.values() if not marks.structure for marker in (marks.begin, marks.end)),
    )
)
_TRUSTED_ROLES = ("assistant", "system")


class Marked(NamedTuple):
    """A conversation for its template, and what its special texts are marked with; "": there are none."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: dict[str, Any]
    mark: str


class SpecialText:
    """For the special tokens of one model. Pure."""

    def __init__(self, specials: Collection[str]) -> None:
        cut = [text for text in specials if len(text) > 1]  # of one character there is nothing to cut
        self._all = longest_of(cut)
        self._unwritten = longest_of(text for text in cut if text not in _WRITTEN)

    def marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> Marked:
        """The very same where no special token's text is in it."""
        given = (messages, tools, variables)
        if not any(map(self._all.search, _texts(given))):
            return Marked(messages, tools, variables, "")
        taken = {mark for text in _texts(given) for mark in _MARK.findall(text)}
        mark = next((mark for mark in _MARKS if mark not in taken), _MARKS[0])
        if mark in taken:  # by somebody who sends them all
            given = _mapped(given, lambda text: text.replace(mark, ""))
        messages, tools, variables = given
        return Marked(
            [self._of_message(message, mark) for message in messages],
            _mapped(tools, lambda text: _cut(self._all, text, mark)),
            _mapped(variables, lambda text: _cut(self._all, text, mark)),
            mark,
        )

    def joined(self, parts: Sequence[str]) -> list[str]:
        """`parts` as one text in pieces, as of a rendered conversation. Every other part, from the second on, is a
        client's: it has no special token's text within a piece."""
        found = [""]
        for index, part in enumerate(parts):
            apart = [part] if part else ["", ""]  # two texts of clients that meet begin none together
            first, *rest = self._plain(part) if index % 2 else apart
            found[-1] += first
            found += rest
        return found

    def _plain(self, text: str) -> list[str]:
        marked = self.marked([{"role": "user", "content": text}], None, {})
        return pieces(marked.messages[0]["content"], marked.mark) if marked.mark else [text]

    def _of_message(self, message: Mapping[str, Any], mark: str) -> Any:
        pattern = self._unwritten if message.get("role") in _TRUSTED_ROLES else self._all
        return _mapped(message, lambda text: _cut(pattern, text, mark))


def pieces(text: str, mark: str) -> list[str]:
    """A rendered conversation, cut at its marks, a template's JSON with ASCII alone included."""
    return [text[begin:end] for begin, end in piece_spans(text, mark)]


def piece_spans(text: str, mark: str) -> list[tuple[int, int]]:
    """Where the pieces of `text` lie, in characters."""
    if not mark:
        return [(0, len(text))]
    marks = [found.span() for found in re.finditer(f"{mark}|\\\\u{ord(mark):04x}", text)]
    return [*zip((0, *(end for _, end in marks)), (*(begin for begin, _ in marks), len(text)), strict=True)]


def _cut(pattern: "re.Pattern[str]", text: str, mark: str) -> str:
    """`text` with `mark` behind the first character of each special token's text, overlapping ones too."""
    parts, begin = [], 0
    found = pattern.search(text)
    while found is not None:
        end = found.start() + 1
        parts.append(text[begin:end])
        begin = end
        found = pattern.search(text, end)
    return mark.join((*parts, text[begin:])) if parts else text


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value`, of JSON's kinds, with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _texts(value: Any) -> list[str]:
    """All texts in `value`, keys among them, in no order."""
    found, inside = list[str](), [value]
    for one in inside:  # which grows meanwhile
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            inside += one
        elif one is not None and isinstance(one, (dict, Mapping)):  # a dict is known faster
            inside += one
            inside += one.values()
    return found

"""What every parser reads with: text that comes in pieces, read as if it were whole. Pure.

    def machine(scan):                      a parser is a generator: it reads on, and is resumed with more text
        marker = yield from scan.content("<tool_call>")     only where what it has does not decide yet
        ...

Every decision depends on the text alone and never on where it was cut, so any cutting gives the same events.

    ─── text ───▶  already read │ mark ... at │ not read yet │ not there yet
                                  └ what `fall_back` makes ordinary text of, when it is no call after all
"""

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Reading that is suspended where the text does not go on yet, and returns a T.
Steps = Generator[None, None, T]


class Text(NamedTuple):
    """Ordinary text of the answer."""

    text: str


class Thought(NamedTuple):
    """Reasoning before the answer."""

    text: str


class CallBegin(NamedTuple):
    """A call begins; what `Arguments` follow are its own."""

    name: str


class Arguments(NamedTuple):
    """The next part of the JSON text of the call's arguments."""

    text: str


Event = Text | Thought | CallBegin | Arguments


class Scanner:
    """The text read so far, and what was found in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = 0
        self._ended = False
        self._space = ""  # white space that is shown if text follows it, and not if a call does
        self._behind_call = False  # whether a call was the last thing found
        self._events: list[Event] = []

    # --- from outside ----------------------------------------------------------------------------

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def take(self) -> list[Event]:
        """What was found since the last call."""
        events, self._events = self._events, []
        return events

    # --- found -----------------------------------------------------------------------------------

    def text(self, text: str) -> None:
        """Ordinary text. White space waits for what follows it."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Text(shown))
            self._behind_call = False

    def thought(self, text: str) -> None:
        if text:
            self._events.append(Thought(text))

    def begin(self, name: str) -> None:
        """A call: there is no way back from here, so what was read may be forgotten."""
        self._space = ""
        self._behind_call = True
        self._events.append(CallBegin(clean(name)))
        self._forget()

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(clean(text)))
        self._forget()

    def last_space(self) -> None:
        """White space at the end is part of an answer, but not of what stands behind a call."""
        if self._space and not self._behind_call:
            self._events.append(Text(self._space))
        self._space = ""

    # --- reading ---------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Behind the character that `peek` has shown."""
        self._at += 1

    def spaces(self) -> Steps[str]:
        """Behind white space; returns the next character, "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or not char.isspace():
                return char
            self._at += 1

    def starts(self, *markers: str) -> Steps[str]:
        """The first of `markers` that stands here, "" if none does; of two that begin alike name the longer
        first. Nothing is read."""
        while True:
            rest = self._text[self._at :]
            for marker in markers:
                if rest.startswith(marker):
                    return marker
                if marker.startswith(rest) and not self._ended:
                    break  # it may yet be this one
            else:
                return ""
            yield

    def optional(self, *markers: str) -> Steps[str]:
        """Behind one of `markers`, white space before it allowed; "" and nothing read if none stands here."""
        before = self._at
        yield from self.spaces()
        marker = yield from self.starts(*markers)
        self._at = self._at + len(marker) if marker else before
        return marker

    def run(self, stop: re.Pattern[str]) -> Steps[str]:
        """What stands here of the characters before the next that `stop` matches: at least one of them
        unless it stands here. "" there and at the end."""
        if not (yield from self.peek()):
            return ""
        found = stop.search(self._text, self._at)
        end = found.start() if found else len(self._text)
        text = self._text[self._at : end]
        self._at = end
        return text

    def name(self, stop: re.Pattern[str]) -> Steps[str]:
        """All characters before the next that `stop` matches; "" when the text ends first."""
        parts = []
        while part := (yield from self.run(stop)):
            parts.append(part)
        return "".join(parts) if (yield from self.peek()) else ""

    def until(self, markers: tuple[str, ...], sink: Callable[[str], Any]) -> Steps[str]:
        """Gives `sink` the text before the first of `markers`, and stands behind that; "" at the end."""
        stop = first_characters(markers)
        while True:
            if part := (yield from self.run(stop)):
                sink(part)
                continue
            if not (yield from self.peek()):
                return ""
            if marker := (yield from self.starts(*markers)):
                self._at += len(marker)
                return marker
            sink(self._text[self._at])
            self._at += 1

    def content(self, *markers: str) -> Steps[str]:
        """Finds ordinary text before the first of `markers` and stands behind that; "" at the end.
        `fall_back` returns to the marker and takes it for text."""
        self._forget()
        stop = first_characters(markers)
        while True:
            if part := (yield from self.run(stop)):
                self.text(part)
            elif not (yield from self.peek()):
                return ""
            elif marker := (yield from self.starts(*markers)):
                self.mark()
                self._at += len(marker)
                return marker
            else:
                self.text(self._text[self._at])
                self._at += 1
            self._forget()

    def rest(self) -> Steps[None]:
        """Everything that follows is ordinary text."""
        while (yield from self.peek()):
            self.text(self._text[self._at :])
            self._at = len(self._text)
            self._forget()

    def mark(self) -> None:
        """From here on it may be a call."""
        self._mark = self._at

    def back(self) -> None:
        """To the mark: what was read since is read again."""
        self._at = self._mark

    def fall_back(self) -> None:
        """It was none: the character at the mark is ordinary text, and what follows is read again."""
        self.text(self._text[self._mark : self._mark + 1])
        self._at = min(self._mark + 1, len(self._text))

    def _forget(self) -> None:
        self._text = self._text[self._at :]
        self._at = self._mark = 0


def clean(text: str) -> str:
    """`text` as it can be encoded: half a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + re.escape("".join({marker[0] for marker in markers})) + "]")


# The tools by name: the JSON types of each parameter, joined by `|` (`string`, `integer|null`); "" when unknown.
Types = Mapping[str, Mapping[str, str]]

Machine = Callable[[Scanner, Types], Steps[None]]  # reads a whole answer

# JSON's names for Python's types.
TYPE_OF: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}

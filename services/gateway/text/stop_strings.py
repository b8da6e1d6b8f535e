"""Stop strings in a stream of text: what may become one is held back, and a match cuts the text.

    fed        "...the answer is 42\nUs"        stop: "\nUser:"
    emitted    "...the answer is 42"
    held back                      "\nUs"       may still become the stop string

The match that ends first wins, and of those that end there the longest: this does not depend on how
the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Pure. With no stop strings it passes everything through."""

    __slots__ = ("_held", "_included", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`stops` are not empty strings; `included`: the one that ends the text is part of it."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._included = included
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched = ""
        """The one that has ended the text."""

    def feed(self, text: str) -> str:
        """The text that can be shown now. Once `matched`, nothing more comes."""
        if self.matched or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, start = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._included else start]
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Where the winning match ends and starts."""
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches) if matches else None

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

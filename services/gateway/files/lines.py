r"""The lines of a file, from the object store, a few at a time, however their bytes were cut into parts.

    feed(b'\xef\xbb\xbf{"a') ──▶ []           feed(b'":1}\r\n\n{"b') ──▶ [line 1]      end() ──▶ [line 3]

Lines end with \n or \r\n; blank ones are counted and left out; a byte order mark at the beginning is none of
the text. A line that is too long is given up as soon as that is known, so memory is bounded by the limit and
one part.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Literal, NamedTuple

from services.gateway.files.files import Files

BOM = b"\xef\xbb\xbf"
Fault = Literal["", "too_long", "not_utf8"]


class FileLine(NamedTuple):
    """A line that is not blank."""

    number: int  # from 1, blank lines counted
    data: bytes  # without its end; empty where there is a fault
    fault: Fault


class LineSplitter:
    """Fed with the parts of one file."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of a line, its end not counted."""
        self._limit = limit
        self._held = bytearray()  # the beginning of a line
        self._number = 1
        self._first = True  # whether nothing has been said of the file's beginning yet
        self._too_long = False  # whether what is left of the current line is thrown away

    def feed(self, part: bytes) -> list[FileLine]:
        """The lines that end in `part`."""
        lines: list[FileLine] = []
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            self._hold(part[begin:end])
            self._finish(lines)
            begin = end + 1
        self._hold(part[begin:])
        return lines

    def end(self) -> list[FileLine]:
        """The last line, where it had no end."""
        lines: list[FileLine] = []
        self._finish(lines)
        return lines

    def _hold(self, data: bytes) -> None:
        if self._too_long:
            return
        self._held += data
        if self._first and len(self._held) >= len(BOM):
            self._drop_mark()
        if len(self._held) > self._limit + len(BOM) + 1:
            self._too_long = True
            self._held.clear()

    def _drop_mark(self) -> None:
        self._first = False
        if self._held.startswith(BOM):
            del self._held[: len(BOM)]

    def _finish(self, lines: list[FileLine]) -> None:
        number, too_long = self._number, self._too_long
        self._number, self._too_long, self._first = number + 1, False, False
        data = bytes(self._held.removesuffix(b"\r"))
        self._held.clear()
        if too_long or len(data) > self._limit:
            lines.append(FileLine(number, b"", "too_long"))
        elif data.strip():
            lines.append(FileLine(number, data, "") if _is_utf8(data) else FileLine(number, b"", "not_utf8"))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


AT_ONCE = 32  # lines that are looked at before others get their turn
PATIENCE = 60.0  # seconds for which a chunk is tried again while the broker is away


async def input_lines(files: Files, object_name: str, most: int) -> AsyncGenerator[FileLine, None]:
    """Every line of a file that is not blank. `most`: bytes of a line. Raises `MissingObject`, `BrokerUnavailable`,
    `InternalError`."""
    splitter = LineSplitter(most)
    count = 0
    async with contextlib.aclosing(files.objects.read(object_name, patience=PATIENCE)) as parts:
        async for part in parts:
            for line in splitter.feed(part):
                yield line
                count += 1
                if count % AT_ONCE == 0:
                    await asyncio.sleep(0)
    for line in splitter.end():
        yield line

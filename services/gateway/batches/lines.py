r"""The lines of a batch's input, from the object store, a few at a time, however their bytes were cut into parts; and
whether they are requests of one batch. Of the lines that are checked nothing is kept but eight bytes of each
custom_id's hash, and of what is wrong the first hundred findings.

    feed(b'\xef\xbb\xbf{"a') ──▶ []           feed(b'":1}\r\n\n{"b') ──▶ [line 1]      end() ──▶ [line 3]

Lines end with \n or \r\n; blank ones are counted and left out; a byte order mark at the beginning is none of
the text. A line that is too long is given up as soon as that is known, so memory is bounded by the limit and
one part.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from services.gateway.batches.files import Files
from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.decoding import refusal
from shared import limits
from shared.errors import InvalidRequest
from shared.messages.batches import BatchError

BOM = b"\xef\xbb\xbf"
Fault = Literal["", "too_long", "not_utf8"]


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """From 1, blank lines counted."""
    data: bytes
    """Without its end; empty where there is a fault."""
    fault: Fault


class LineSplitter:
    """Fed with the parts of one file."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of a line, its end not counted."""
        self._limit = limit
        self._held = bytearray()
        """The beginning of a line."""
        self._number = 1
        self._first = True
        """Whether nothing has been said of the file's beginning yet."""
        self._too_long = False
        """Whether what is left of the current line is thrown away."""

    def feed(self, part: bytes) -> list[Line]:
        """The lines that end in `part`."""
        lines: list[Line] = []
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            self._hold(part[begin:end])
            self._finish(lines)
            begin = end + 1
        self._hold(part[begin:])
        return lines

    def end(self) -> list[Line]:
        """The last line, where it had no end."""
        lines: list[Line] = []
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

    def _finish(self, lines: list[Line]) -> None:
        number, too_long = self._number, self._too_long
        self._number, self._too_long, self._first = number + 1, False, False
        data = bytes(self._held.removesuffix(b"\r"))
        self._held.clear()
        if too_long or len(data) > self._limit:
            lines.append(Line(number, b"", "too_long"))
        elif data.strip():
            lines.append(Line(number, data, "") if _is_utf8(data) else Line(number, b"", "not_utf8"))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


AT_ONCE = 32
"""Lines that are looked at before others get their turn."""
PATIENCE = 60.0
"""Seconds for which a chunk is tried again while the broker is away."""
ENVELOPE = 64 << 10
"""Bytes of a line beside its body."""


async def input_lines(files: Files, object_name: str, most: int) -> AsyncGenerator[Line, None]:
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


# --- whether they are requests of one batch ------------------------------------------------------

MAX_ERRORS = 100
CheckBody = Callable[[msgspec.Raw], str]
"""Returns the model of a body; raises `InvalidRequest`."""


class _LineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(_LineFields)


class Request(msgspec.Struct, frozen=True):
    """A line of the input file."""

    line: int
    custom_id: str
    body: msgspec.Raw


class Wrong(Exception):
    """What is wrong with a line."""

    def __init__(self, line: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message, line, param)


def parse(line: Line, url: str) -> Request:
    """The request of `line`. Raises `Wrong`."""
    fields = _fields(line)
    custom_id = fields.custom_id
    if not 0 < len(custom_id) <= limits.CUSTOM_ID.value:
        raise Wrong(
            line.number,
            "invalid_custom_id",
            f"A custom_id has 1 to {limits.CUSTOM_ID.value} characters.",
            "custom_id",
        )
    if fields.method != "POST":
        raise Wrong(line.number, "invalid_method", "The method of a request must be 'POST'.", "method")
    if fields.url != url:
        raise Wrong(
            line.number,
            "invalid_url",
            f"The URL provided for this request ('{fields.url[:64]}') does not match the batch endpoint '{url}'.",
            "url",
        )
    if bytes(fields.body)[:1] != b"{":
        raise Wrong(line.number, "invalid_type", "The body of a request must be an object.", "body")
    return Request(line.number, custom_id, fields.body)


def _fields(line: Line) -> _LineFields:
    if line.fault == "too_long":
        raise Wrong(line.number, "line_too_long", "The line is too long; shorten its request.")
    if line.fault:
        raise Wrong(line.number, "invalid_json_line", "This line is not valid UTF-8.")
    try:
        return _decoder.decode(line.data)
    except msgspec.ValidationError as error:
        refused = refusal(error, _LineFields, lambda: msgspec.json.decode(line.data))
        if refused.param is None:
            raise Wrong(line.number, "invalid_json_line", "This line is not a JSON object.") from None
        raise Wrong(line.number, refused.reason, refused.message[:256], refused.param[:64]) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Wrong(line.number, "invalid_json_line", "This line is not parseable as valid JSON.") from None


class Checker:
    """Fed with the lines of one file."""

    def __init__(self, url: str, check_body: CheckBody, max_requests: int) -> None:
        self._url = url
        self._check_body = check_body
        self._max_requests = max_requests
        self._seen: set[int] = set()
        """Eight bytes of each custom_id's hash: two of a million meet once in forty million files."""
        self.errors: list[BatchError] = []
        self.requests = 0
        self.model = ""
        """The first line's: a batch has one."""

    @property
    def full(self) -> bool:
        """Whether it is of no use to go on."""
        return len(self.errors) >= MAX_ERRORS or self.requests > self._max_requests

    def check(self, line: Line) -> None:
        """Counts `line`, or notes what is wrong with it."""
        self.requests += 1
        if self.requests > self._max_requests:
            self.errors.append(
                BatchError(
                    "too_many_requests",
                    f"The file has more than {self._max_requests:,} requests; split it.",
                    line.number,
                )
            )
            return
        try:
            request = parse(line, self._url)
            self._check_unique(request)
            self._check_model(request)
        except Wrong as wrong:
            self.errors.append(wrong.error)

    def end(self) -> None:
        """All lines have been seen."""
        if not self.requests:
            self.errors.append(BatchError("empty_file", "The file has no requests."))

    def _check_unique(self, request: Request) -> None:
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=8).digest()
        key = int.from_bytes(digest)
        if key in self._seen:
            raise Wrong(
                request.line,
                "duplicate_custom_id",
                f"The custom_id '{request.custom_id[:64]}' for this request is a duplicate of another "
                "request. The custom_id must be unique for each request in a batch.",
                "custom_id",
            )
        self._seen.add(key)

    def _check_model(self, request: Request) -> None:
        try:
            model = self._check_body(request.body)
        except InvalidRequest as error:
            reason = getattr(error, "reason", None) or error.code
            param = f"body.{error.param}" if error.param else "body"
            raise Wrong(request.line, reason, error.message, param) from None
        self.model = self.model or model
        if model != self.model:
            raise Wrong(
                request.line,
                "mismatched_model",
                f"The model '{model[:64]}' is another one than '{self.model[:64]}' of the lines before; "
                "a batch has one model.",
                "body.model",
            )


def refuse_for_lines(body: Mapping[str, Any]) -> None:
    """Raises `InvalidParameter` where a line wants to be streamed, or to be left alone: it is already."""
    for name in ("stream", "background"):
        if body.get(name):
            raise InvalidParameter(
                f"Unsupported parameter: '{name}' is not supported in a batch; leave it out.",
                param=name,
                reason="unsupported_parameter",
            )

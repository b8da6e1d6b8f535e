"""Whether the lines of a file are requests of one batch. Of those that are checked nothing is kept but eight bytes of
each custom_id's hash, and of what is wrong the first hundred findings.
"""

import hashlib
from collections.abc import Callable

import msgspec

from services.gateway.core.errors import refusal
from services.gateway.files.lines import FileLine
from shared import limits
from shared.errors import InvalidRequest
from shared.messages.batches import BatchError

ENVELOPE = 64 << 10  # bytes of a line beside its body
MAX_ERRORS = 100
CheckBody = Callable[[msgspec.Raw], str]  # returns the model of a body; raises `InvalidRequest`


class _LineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(_LineFields)


class BatchLine(msgspec.Struct, frozen=True):
    """A line of the input file."""

    line: int
    custom_id: str
    body: msgspec.Raw


class Wrong(Exception):
    def __init__(self, line: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message, line, param)


def parse(line: FileLine, url: str) -> BatchLine:
    """The request of `line`. Raises `Wrong`."""
    fields = _fields(line)
    custom_id = fields.custom_id
    if not 0 < len(custom_id) <= limits.CUSTOM_ID.value:
        raise Wrong(
            line.number, "invalid_custom_id", f"A custom_id has 1 to {limits.CUSTOM_ID.value} characters.", "custom_id"
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
    return BatchLine(line.number, custom_id, fields.body)


def _fields(line: FileLine) -> _LineFields:
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
        # Eight bytes of each custom_id's hash: two of a million meet once in forty million files.
        self._seen: set[int] = set()
        self.errors: list[BatchError] = []
        self.requests = 0
        self.model = ""  # the first line's: a batch has one

    @property
    def full(self) -> bool:
        """Whether it is of no use to go on."""
        return len(self.errors) >= MAX_ERRORS or self.requests > self._max_requests

    def check(self, line: FileLine) -> None:
        """Counts `line`, or notes what is wrong with it."""
        self.requests += 1
        if self.requests > self._max_requests:
            said = f"The file has more than {self._max_requests:,} requests; split it."
            self.errors.append(BatchError("too_many_requests", said, line.number))
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

    def _check_unique(self, request: BatchLine) -> None:
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

    def _check_model(self, request: BatchLine) -> None:
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

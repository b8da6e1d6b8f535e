"""A form with one file in it (RFC 7578), read as it comes: the file is never whole in memory.

fields ──▶ file's first bytes ──▶ ... ──▶ its last ──▶ fields
   └──────── `until_file`    └── `file_data`      └── `rest`
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from email.message import Message

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from services.gateway.core.asgi import header
from services.gateway.core.errors import ClientGone, InvalidParameter, RequestTimeout, missing
from shared.errors import PayloadTooLarge
from shared.limits import UPLOAD, UPLOAD_FIELD, UPLOAD_FIELD_NAME, UPLOAD_FIELDS, UPLOAD_FORM, UPLOAD_NAME
from shared.service.endpoints import Receive, Scope

FORM_ROOM = UPLOAD_FORM.value
_END = b""


class MultipartForm:
    """One request's form. Raises `InvalidParameter`, `PayloadTooLarge`, `RequestTimeout`, `ClientGone`."""

    def __init__(self, scope: Scope, receive: Receive, timeout: float, limit: int, *, name: str = "file") -> None:
        """`timeout`: seconds that the client may take for each next part of the body; `limit`: bytes of its file, which
        is its field `name`."""
        self._name = name
        self._limit = limit
        self._left = limit + FORM_ROOM  # bytes of the body that may still come, whatever they are
        self._parts = 0
        length = header(scope, b"content-length")
        # Bytes of the body, which are more than those of its file; negative: its client has not said.
        self.announced = int(length) if length is not None and length.isdigit() else -1
        if self.announced > self._left:
            raise self._too_large()
        self.fields: dict[str, str] = {}
        self.filename = ""  # the file's name as the client gave it
        self._receive = receive
        self._timeout = timeout
        self._done = False
        # Of the file, as far as nobody has taken it; `_END` behind its last.
        self._data: deque[bytes] = deque()
        self._file_seen = False
        self._in_file = False
        self._field = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = ""
        self._parser = MultipartParser(
            _boundary(scope),
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
            },
        )

    async def until_file(self) -> None:
        """Reads up to the file's beginning."""
        while not self._file_seen:
            if self._done:
                raise missing(self._name, "it as a part of the form with a file name")
            await self._more()

    async def file_data(self) -> AsyncGenerator[bytes, None]:
        """The file's bytes as they come."""
        while True:
            while not self._data:
                if self._done:
                    raise _broken("it ends within the file")
                await self._more()
            part = self._data.popleft()
            if part == _END:
                return
            yield part

    async def rest(self) -> None:
        """Reads what comes behind the file."""
        while not self._done:
            await self._more()

    async def _more(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(f"No more of the request arrived within {self._timeout:g} s; send it again.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body = message.get("body", b"")
        self._left -= len(body)
        if self._left < 0:
            raise self._too_large()
        try:
            self._parser.write(body)
            if not message.get("more_body", False):
                self._parser.finalize()
                self._done = True
        except FormParserError as error:
            raise _broken(str(error)) from None

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            "The file, or what is sent with it, is too large "
            f"({UPLOAD.cited(self._limit)}; {UPLOAD_FORM.cited()}); split it."
        )

    # --- what the parser finds -------------------------------------------------------------------

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > UPLOAD_FIELDS.value + 1:
            raise _broken(f"it has too many fields ({UPLOAD_FIELDS.cited()})")
        self._disposition, self._field, self._in_file = "", "", False
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        if len(self._header_value) > UPLOAD_FIELD.value:
            raise _broken("a part has too long a header")

    def _on_header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = self._header_value.decode(errors="replace")
        self._header.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        parsed = Message()
        parsed["content-disposition"] = self._disposition
        name, filename = _parameter(parsed, "name"), parsed.get_filename()
        if not name:
            raise _broken("a part has no name")
        if len(name) > UPLOAD_FIELD_NAME.value:
            raise _broken(f"the name of a part is too long ({UPLOAD_FIELD_NAME.cited()})")
        if name == self._name and filename is not None:
            if self._file_seen:
                raise InvalidParameter("Send one file at a time.", param=self._name)
            self._file_seen = self._in_file = True
            self.filename = filename.replace("\\", "/").rpartition("/")[2][: UPLOAD_NAME.value]
        self._field = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            if end > start:
                self._data.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > UPLOAD_FIELD.value:
            raise _broken(f"the field '{self._field[:64]}' is too long ({UPLOAD_FIELD.cited()})")

    def _on_part_end(self) -> None:
        if self._in_file:
            self._in_file = False
            self._data.append(_END)
            return
        try:
            self.fields[self._field] = self._value.decode()
        except UnicodeDecodeError:
            raise _broken(f"the field '{self._field[:64]}' is not UTF-8") from None


def _parameter(parsed: Message, name: str) -> str:
    found = parsed.get_param(name, "", "content-disposition")
    return found if isinstance(found, str) else found[2]


def _boundary(scope: Scope) -> bytes:
    """Raises `InvalidParameter` where the body is no form."""
    parsed = Message()
    parsed["content-type"] = header(scope, b"content-type") or ""
    boundary = parsed.get_boundary()
    if parsed.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidParameter(
            "A file is sent as multipart/form-data with the parts 'purpose' and 'file'.",
            param="content-type",
            reason="invalid_header",
        )
    if len(boundary) > 200:
        raise _broken("its boundary is too long")
    return boundary.encode("latin-1", errors="replace")


def _broken(why: str) -> InvalidParameter:
    return InvalidParameter(
        f"We could not parse the form ({why}); send multipart/form-data.", param=None, reason="invalid_form"
    )

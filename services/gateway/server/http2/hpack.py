"""HTTP/2's headers (HPACK, RFC 7541): read with the hpack package, written by hand. Pure.

What is written are literals that touch no table: a few constant bytes and some values. What is read repeats
itself: a client that calls the same method again sends the same few bytes, as long as the table they point
into has not changed, so what they meant last time is what they mean now.
"""

import base64
import re
from collections.abc import Iterable
from typing import NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from services.gateway.core.errors import InvalidParameter

ENCODINGS = "identity,gzip"  # what request messages may be compressed with, as `grpc-accept-encoding` says it


CONTENT_TYPE = b"application/grpc"
_REMEMBERED = 64  # blocks of headers that a connection remembers
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_PSEUDO = (b":method", b":scheme", b":path", b":authority")
_NAME = re.compile(rb"[!-9;-@\[-~]+")
_NO_VALUE = re.compile(rb"[\0\r\n]")
# What HTTP/1.1 says of its connections.
_OF_CONNECTION = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class HeadersTooLarge(Exception):
    """More headers than are taken."""


class Headers(NamedTuple):
    """A request's. Of a name that comes several times the last value counts, but cookies are none of ours."""

    method: str
    path: str
    content_type: str
    metadata: dict[str, str]  # by lower-case name, `-bin` values as they came
    size: int = 0  # bytes, as RFC 7541 counts them in section 4.1
    # Whether no message may have them (RFC 9113, sections 8.2 and 8.3), nor a content-length as theirs.
    malformed: bool = False

    @property
    def are_of_request(self) -> bool:
        """Whether a request may begin with them (RFC 9113, section 8.3.1)."""
        complete = self.method == "CONNECT" or (self.path and ":scheme" in self.metadata)
        return not self.malformed and bool(self.method and complete)

    @property
    def are_trailers(self) -> bool:
        """Whether a request may end with them (RFC 9113, section 8.1)."""
        pseudo = self.method or self.path or any(name.startswith(":") for name in self.metadata)
        return not self.malformed and not pseudo

    @property
    def content_length(self) -> int | None:
        length = self.metadata.get("content-length")
        return None if length is None or self.malformed else int(length)

    @property
    def timeout(self) -> float | None:
        """Seconds that the client waits. Raises `InvalidParameter`."""
        given = self.metadata.get("grpc-timeout")
        if given is None:
            return None
        match = _TIMEOUT.fullmatch(given)
        if match is None:
            raise InvalidParameter(
                "Invalid header 'grpc-timeout': expected up to 8 digits and one of H, M, S, m, u, n.",
                param="grpc-timeout",
                reason="invalid_header",
            )
        return int(match[1]) * _UNITS[match[2]]


class HeaderDecoder:
    """A connection's. Blocks must be given in the order in which they came."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of a request's headers, as RFC 7541 counts them in section 4.1, beyond which they are not
        read to their end."""
        self._decoder = Decoder(max_header_list_size=limit)
        # What blocks mean that neither change the table nor are outdated by a change.
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Raises `HeadersTooLarge`, and `ValueError` for what is no HPACK."""
        known = self._known.get(block)
        if known is not None:
            return known
        table = self._decoder.header_table
        before, count = (table.dynamic_entries[0] if table.dynamic_entries else None, len(table.dynamic_entries))
        try:
            headers = _headers(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise HeadersTooLarge from None
        except (HPACKError, UnicodeDecodeError, IndexError) as error:
            raise ValueError(str(error) or type(error).__name__) from None
        entries = table.dynamic_entries
        if (
            len(entries) != count
            or (entries and entries[0] is not before)
            or (block[:1] >= b"\x20" and block[0] & 0xE0 == 0x20)
        ):
            self._known.clear()
        elif len(self._known) < _REMEMBERED:
            self._known[block] = headers
        return headers


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    metadata: dict[str, str] = {}
    size = 0
    malformed = regular = False
    for name, value, *_ in pairs:
        text = name.decode("latin-1")
        if name.startswith(b":"):
            malformed |= regular or name not in _PSEUDO or not value or text in metadata
        else:
            regular = True
            malformed |= not _is_field(name, value)
        metadata[text] = value.strip(b" \t").decode("latin-1")  # as gRPC has it, where HTTP/2 would refuse
        size += len(name) + len(value) + 32
    return Headers(
        metadata.pop(":method", ""),
        metadata.pop(":path", ""),
        metadata.pop("content-type", ""),
        metadata,
        size,
        malformed,
    )


def _is_field(name: bytes, value: bytes) -> bool:
    """RFC 9113, sections 8.1.1, 8.2.1 and 8.2.2."""
    if not _NAME.fullmatch(name) or _NO_VALUE.search(value) or name in _OF_CONNECTION:
        return False
    if name == b"te":
        return value == b"trailers"
    return name != b"content-length" or (len(value) < 20 and value.isdigit())


# --- ours ----------------------------------------------------------------------------------------


def literal(name: bytes, value: bytes) -> bytes:
    """A header as a literal without indexing and with a new name (RFC 7541, section 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """An integer with a prefix of 7 bits (section 5.1)."""
    if size < 127:
        return bytes((size,))
    out = bytearray((127,))
    size -= 127
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


# `:status: 200` (entry 8 of the static table), the content type, and what is taken: how every answer begins.
RESPONSE = b"\x88" + literal(b"content-type", CONTENT_TYPE) + literal(b"grpc-accept-encoding", ENCODINGS.encode())


def refusal(status: int, text: bytes) -> bytes:
    """The headers of an answer to what is no gRPC request."""
    return (
        literal(b":status", b"%d" % status) + literal(b"content-type", b"text/plain") + literal(b"grpc-message", text)
    )


def binary(value: bytes) -> bytes:
    """The value of a header whose name ends in `-bin`: base64, its padding left out."""
    return base64.b64encode(value).rstrip(b"=")


def percent_encoded(message: str) -> bytes:
    """A status message as gRPC wants it in `grpc-message`: printable ASCII, the rest and % as %XX."""
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in message.encode()
    )

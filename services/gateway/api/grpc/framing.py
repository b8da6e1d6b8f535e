"""gRPC's messages within a stream of bytes: a flag, a length, the message, gzip perhaps. Pure."""

import zlib
from collections.abc import Iterator

from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.server.http2.hpack import ENCODINGS
from shared.errors import PayloadTooLarge
from shared.limits import BODY, Limit

_GZIP = 16 + zlib.MAX_WBITS


class MessageReader:
    """Of one request. Methods raise `PayloadTooLarge`, and `RouteError` and `InvalidParameter` for messages that are
    compressed in a way that is not taken."""

    __slots__ = ("_buffer", "_encoding", "_limit", "_named")

    def __init__(self, limit: int, encoding: str | None = None, named: Limit = BODY) -> None:
        """`limit`: bytes of one message, as it comes and inflated, the value of `named`. `encoding`: the request's
        `grpc-encoding`."""
        self._buffer = bytearray()
        self._limit = limit
        self._encoding = encoding
        self._named = named

    @property
    def partial(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._buffer)

    @property
    def size(self) -> int:
        """Bytes that are held of it."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that became complete, each inflated when it is asked for. To be read to its end, or never fed
        again."""
        if not self._buffer and len(data) >= 5:
            size = int.from_bytes(data[1:5], "big")
            if len(data) == size + 5:  # nearly always
                self._check(data[0], size)
                yield self._whole(data[0], data[5:])
                return
        self._buffer += data
        yield from self._split()

    def _split(self) -> Iterator[bytes]:
        buffer = self._buffer
        at = 0
        while len(buffer) - at >= 5:
            size = int.from_bytes(buffer[at + 1 : at + 5], "big")
            self._check(buffer[at], size)
            if len(buffer) - at - 5 < size:
                break
            yield self._whole(buffer[at], bytes(buffer[at + 5 : at + 5 + size]))
            at += 5 + size
        del buffer[:at]

    def _check(self, flag: int, size: int) -> None:
        if flag and self._encoding != "gzip":
            raise RouteError(
                f"The request message is compressed with {(self._encoding or 'nothing that is named')[:64]!r}; "
                f"supported are {ENCODINGS}.",
                status=501,
                reason="unsupported_encoding",
            )
        if size > self._limit:
            raise self._too_large(f"{size:,}")

    def _too_large(self, size: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"The request message has {size} bytes; shorten the request ({self._named.cited(self._limit)})."
        )

    def _whole(self, flag: int, data: bytes) -> bytes:
        if not flag:
            return data
        inflate = zlib.decompressobj(_GZIP)
        try:
            found = inflate.decompress(data, self._limit + 1)
        except zlib.error:
            found = b""
        if len(found) > self._limit:
            raise self._too_large(f"inflated more than {self._limit:,}")
        if not inflate.eof or inflate.unused_data:
            raise InvalidParameter(
                "The request message is not gzip, though its flag and grpc-encoding say so; compress it whole, or send "
                "it as it is.",
                param=None,
                reason="invalid_encoding",
            )
        return found

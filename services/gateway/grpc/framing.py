"""gRPC's messages within a stream of bytes: a flag, a length, the message. Pure."""

from services.gateway.errors import RouteError
from shared.errors import PayloadTooLarge


class MessageReader:
    """Of one request. Methods raise `PayloadTooLarge`, and `RouteError` for compressed messages."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of one message."""
        self._buffer = bytearray()
        self._limit = limit

    @property
    def partial(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that became complete."""
        if not self._buffer and len(data) >= 5:
            size = int.from_bytes(data[1:5], "big")
            if len(data) == size + 5:  # nearly always
                self._check(data[0], size)
                return [data[5:]]
        self._buffer += data
        return self._split()

    def _split(self) -> list[bytes]:
        buffer = self._buffer
        found: list[bytes] = []
        at = 0
        while len(buffer) - at >= 5:
            size = int.from_bytes(buffer[at + 1 : at + 5], "big")
            self._check(buffer[at], size)
            if len(buffer) - at - 5 < size:
                break
            found.append(bytes(buffer[at + 5 : at + 5 + size]))
            at += 5 + size
        del buffer[:at]
        return found

    def _check(self, flag: int, size: int) -> None:
        if flag:
            raise RouteError(
                "Compressed messages are not supported; send them as they are (grpc-accept-encoding: identity).",
                status=501,
                reason="unsupported_encoding",
            )
        if size > self._limit:
            raise PayloadTooLarge(
                f"The request message has {size:,} bytes, and {self._limit:,} are allowed; shorten the request."
            )

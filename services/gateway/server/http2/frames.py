"""HTTP/2 in numbers and names (RFC 9113): frames, errors, limits, and what is known of a stream. Pure."""

import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.gateway.server.http2.hpack import Headers
from shared import limits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 0x5, 0x6, 0x7, 0x8, 0x9
ENHANCE_YOUR_CALM = 0xB

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADER_LIST = range(1, 7)

# Largest frame's payload that is taken, and sent to a peer that names no other size: HTTP/2's smallest.
FRAME = 16_384
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
LAST_STREAM = 2**31 - 1

_head = struct.Struct(">HBBBL")
read_head = _head.unpack_from
pack_head = _head.pack
# The head of a DATA frame and the prefix of the one gRPC message in it.
pack_message = struct.Struct(">HBBBLBL").pack
pack_prefix = struct.Struct(">BL").pack


class FrameLimits(NamedTuple):
    """What a peer may have of us."""

    streams: int = limits.GRPC_CALLS.value  # streams open at a time
    # Size of a request's headers, as HPACK counts it; who sends more has its call refused.
    header_bytes: int = limits.GRPC_METADATA.value
    # Size of a request's headers, as HPACK counts it, and encoded, beyond which they are not read to their end, and
    # with them the connection ends: the headers that follow could not be understood.
    unread_header_bytes: int = 4 * limits.GRPC_METADATA.value
    connection_window: int = 1 << 20  # bytes of requests that may be under way on the connection
    work: int = limits.GRPC_WORK.value  # what the peer's frames may cost, in units of `WorkBudget`
    # Bytes that the peer has not read, beyond which no more of its frames are.
    unread: int = limits.GRPC_UNREAD.value
    # Bytes of answers that wait for a peer which does not read, beyond which the connection ends.
    owed: int = limits.GRPC_OWED.value


class ProtocolError(Exception):
    """The peer breaks the protocol: the connection cannot go on."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamError(Exception):
    """The peer breaks the protocol on one stream."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True, eq=False)
class Stream:
    """One request and its answer."""

    id: int
    window: int  # bytes that the peer takes on it now; below 0 when it has made its windows smaller
    receive_window: int = DEFAULT_WINDOW
    held: int = 0  # bytes that came and have not been given back to its window
    pending: bytes = b""  # what waits for the window, behind `sent` bytes that have gone
    sent: int = 0
    trailers: bytes | None = None  # what follows `pending` and ends the stream
    remote_ended: bool = False
    content_left: int | None = None  # bytes of DATA that are to come by its content-length
    closed: bool = False
    work: int = 0  # what its headers and messages were charged since `Sender.excuse`
    # When it was found that the peer lets nothing of `pending` through; None: some of it went since.
    stalled_since: float | None = None
    refused: bool = False  # whether the request was refused before anything was done for it
    owner: object = None  # what the events' receiver keeps with it


class Events(Protocol):
    """Who is told what the peer does."""

    def on_headers(self, stream: Stream, headers: Headers, ended: bool) -> None: ...

    def on_data(self, stream: Stream, data: bytes, ended: bool) -> None:
        """`data` counts against the stream's window until `Connection.release`."""
        ...

    def on_reset(self, stream: Stream) -> None:
        """The stream is gone, by the peer's doing or for its breaking the protocol."""
        ...

    def on_writable(self, stream: Stream) -> None:
        """What waited has gone out."""
        ...


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]

"""A server's end of an HTTP/2 connection (RFC 9113), as gRPC needs it: bytes in, events and bytes out. Pure.

    bytes ──receive──▶ Connection ──▶ events: on_headers, on_data, on_reset, on_writable
      ▲                    │
      └──── take() ◀───────┘◀── send_headers, send_data, end, reset, ping, go_away

    a stream        open ──END_STREAM──▶ half closed (remote) ──our END_STREAM──▶ gone
                      └─────────────── RST_STREAM, either way ──────────────────▶ gone

Invariants: never more than the peer's windows and frame size allow is sent; what does not fit waits in its
stream, in order, and the sender is told to wait; what the peer may send is bounded by `Limits`.
"""

import struct
from typing import NamedTuple, Protocol

from services.gateway.grpc.headers import HeaderDecoder, Headers, HeadersTooLarge

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 0x5, 0x6, 0x7, 0x8, 0x9
ENHANCE_YOUR_CALM = 0xB

_HEADER_TABLE_SIZE, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST = 0x1, 0x3, 0x4, 0x5, 0x6

FRAME = 16_384
"""Largest frame's payload that is taken, and sent to a peer that names no other size: HTTP/2's smallest."""
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
LAST_STREAM = 2**31 - 1

_head = struct.Struct(">HBBBL")
_read_head = _head.unpack_from
_pack_head = _head.pack
_pack_message = struct.Struct(">HBBBLBL").pack
"""The head of a DATA frame and the prefix of the one gRPC message in it."""
_pack_prefix = struct.Struct(">BL").pack


class Limits(NamedTuple):
    """What a peer may have of us."""

    streams: int = 1024
    """Streams open at a time."""
    header_bytes: int = 16_384
    """Size of a request's headers, as HPACK counts it, and encoded."""
    connection_window: int = 1 << 20
    """Bytes of requests that may be under way on the connection."""
    resets: int = 1000
    """Streams that the peer may reset while we have sent no more than `resets` answers: see `_count_reset`."""
    control_frames: int = 10_000
    """PINGs and SETTINGS that may come between two frames of requests."""


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


class Stream:
    """One request and its answer."""

    __slots__ = (
        "closed",
        "held",
        "id",
        "local_ended",
        "owner",
        "pending",
        "receive_window",
        "remote_ended",
        "trailers",
        "window",
    )

    def __init__(self, number: int, window: int) -> None:
        self.id = number
        self.window = window
        """Bytes that the peer takes on it now; below 0 when it has made its windows smaller."""
        self.receive_window = DEFAULT_WINDOW
        self.held = 0
        """Bytes that came and have not been given back to its window."""
        self.pending = b""
        """What waits for the window."""
        self.trailers: bytes | None = None
        """What follows `pending` and ends the stream."""
        self.remote_ended = False
        self.local_ended = False
        self.closed = False
        self.owner: object = None
        """What the events' receiver keeps with it."""


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


class Connection:
    """`receive` raises nothing: after a fault `failed` is set, and what there is to take says goodbye."""

    def __init__(self, events: Events, limits: Limits) -> None:
        self._events = events
        self._limits = limits
        self._rest = b""
        self._out: list[bytes] = []
        self._decoder = HeaderDecoder(limits.header_bytes)
        self.streams: dict[int, Stream] = {}
        self.failed = ""
        """Why the connection ended."""
        self.spoke = False
        """Whether the peer has sent its preface."""
        self.leaving = False
        """Whether one of the two has said that it ends."""
        self.pinged = False
        """Whether a PING of ours is unanswered."""
        self._window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._max_frame = FRAME
        self._receive_window = limits.connection_window
        self._last = 0
        """The newest stream of the peer."""
        self._refuse_above = LAST_STREAM
        self._continued: tuple[int, int, list[bytes]] | None = None
        """Stream, flags and parts of headers that go on in CONTINUATION frames."""
        self._resets = 0
        self._control = 0
        self._frames = {
            DATA: self._on_data,
            HEADERS: self._on_headers,
            PRIORITY: self._on_priority,
            RST_STREAM: self._on_rst_stream,
            SETTINGS: self._on_settings,
            PUSH_PROMISE: self._on_push_promise,
            PING: self._on_ping,
            GOAWAY: self._on_goaway,
            WINDOW_UPDATE: self._on_window_update,
            CONTINUATION: self._on_continuation,
        }

    def take(self) -> bytes:
        """What is to be written now."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    # --- the peer's bytes ------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Takes what has come."""
        if self.failed:
            return
        buffer = self._rest + data if self._rest else data
        try:
            self._rest = self._read(buffer)
        except ProtocolError as error:
            self._fail(error)

    def _read(self, buffer: bytes) -> bytes:
        """Reads whole frames; returns what is left."""
        at, end = 0, len(buffer)
        if not self.spoke:
            if not PREFACE.startswith(buffer[: len(PREFACE)]):
                raise ProtocolError(PROTOCOL_ERROR, "this port speaks gRPC, which is HTTP/2")
            if end < len(PREFACE):
                return buffer
            self.spoke = True
            self._greet()
            at = len(PREFACE)
        frames = self._frames
        while end - at >= 9:
            high, low, kind, flags, number = _read_head(buffer, at)
            length = high << 8 | low
            if length > FRAME:
                raise ProtocolError(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if end - at - 9 < length:
                break
            payload = buffer[at + 9 : at + 9 + length]
            at += 9 + length
            if self._continued is not None and kind != CONTINUATION:
                raise ProtocolError(PROTOCOL_ERROR, "headers were not continued")
            handle = frames.get(kind)
            if handle is not None:
                try:
                    handle(number & LAST_STREAM, flags, payload)
                except StreamError as error:
                    self._break_stream(number & LAST_STREAM, error.code)
        return buffer[at:] if at else buffer

    def _on_headers(self, number: int, flags: int, payload: bytes) -> None:
        if not number:
            raise ProtocolError(PROTOCOL_ERROR, "headers on stream 0")
        payload = _unpadded(flags, payload)
        if flags & PRIORITY_FLAG:
            if len(payload) < 5:
                raise ProtocolError(FRAME_SIZE_ERROR, "headers too short for their priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._headers_complete(number, flags, payload)
        else:
            self._continued = (number, flags, [payload])

    def _on_continuation(self, number: int, flags: int, payload: bytes) -> None:
        if self._continued is None or self._continued[0] != number:
            raise ProtocolError(PROTOCOL_ERROR, "a continuation of nothing")
        _, first_flags, parts = self._continued
        parts.append(payload)
        if len(parts) > 64 or sum(map(len, parts)) > self._limits.header_bytes:
            raise ProtocolError(ENHANCE_YOUR_CALM, "headers of too many bytes")
        if flags & END_HEADERS:
            self._continued = None
            self._headers_complete(number, first_flags, b"".join(parts))

    def _headers_complete(self, number: int, flags: int, block: bytes) -> None:
        self._control = 0
        try:
            headers = self._decoder.decode(block)
        except HeadersTooLarge:
            raise ProtocolError(ENHANCE_YOUR_CALM, "headers too large") from None
        except ValueError as error:
            raise ProtocolError(COMPRESSION_ERROR, f"headers that cannot be read: {error}") from None
        stream = self.streams.get(number)
        ended = bool(flags & END_STREAM)
        if stream is not None:  # trailers: gRPC clients send none, and nothing in them counts
            if stream.remote_ended or not ended:
                raise StreamError(STREAM_CLOSED if stream.remote_ended else PROTOCOL_ERROR)
            stream.remote_ended = True
            self._events.on_data(stream, b"", True)
            return
        if number <= self._last:
            return  # of a stream that has gone: its headers had to be read for the table's sake
        if not number & 1:
            raise ProtocolError(PROTOCOL_ERROR, "a client's stream has an odd number")
        self._last = number
        if number > self._refuse_above or len(self.streams) >= self._limits.streams:
            self._write(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big"))
            return
        stream = self.streams[number] = Stream(number, self._initial_window)
        stream.remote_ended = ended
        self._events.on_headers(stream, headers, ended)

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise ProtocolError(FLOW_CONTROL_ERROR, "more data than the connection's window")
        limit = self._limits.connection_window
        if self._receive_window <= limit >> 1:
            self._write(WINDOW_UPDATE, 0, 0, (limit - self._receive_window).to_bytes(4, "big"))
            self._receive_window = limit
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last or not number:
                raise ProtocolError(PROTOCOL_ERROR, "data on a stream that was never opened")
            return
        if stream.remote_ended:
            raise StreamError(STREAM_CLOSED)
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamError(FLOW_CONTROL_ERROR)
        self._control = 0
        stream.held += size
        ended = bool(flags & END_STREAM)
        stream.remote_ended = ended
        self._events.on_data(stream, _unpadded(flags, payload), ended)

    def _on_rst_stream(self, number: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(FRAME_SIZE_ERROR, "a RST_STREAM of another size than 4")
        if not number or number > self._last:
            raise ProtocolError(PROTOCOL_ERROR, "the reset of a stream that was never opened")
        self._count_reset()
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)
            self._events.on_reset(stream)

    def _count_reset(self) -> None:
        """Opening and resetting streams costs the peer nothing and us a request (CVE-2023-44487): an answer
        that we complete pays for one reset."""
        self._resets += 1
        if self._resets > self._limits.resets:
            raise ProtocolError(ENHANCE_YOUR_CALM, "too many resets")

    def _on_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed SETTINGS")
        if flags & ACK:
            return
        self._count_control()
        self._write(SETTINGS, ACK, 0, b"")  # before what larger windows let go
        for at in range(0, len(payload), 6):
            self._set(
                int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            )

    def _set(self, name: int, value: int) -> None:
        if name == _INITIAL_WINDOW:
            if value > LARGEST_WINDOW:
                raise ProtocolError(FLOW_CONTROL_ERROR, "an initial window that is too large")
            change, self._initial_window = value - self._initial_window, value
            try:
                for stream in list(self.streams.values()):
                    self._widen(stream, change)
            except StreamError as error:
                raise ProtocolError(error.code, "an initial window that is too large") from None
        elif name == _MAX_FRAME:
            if not FRAME <= value < 1 << 24:
                raise ProtocolError(PROTOCOL_ERROR, "a frame size out of range")
            self._max_frame = value

    def _on_ping(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed PING")
        if flags & ACK:
            self.pinged = False
            return
        self._count_control()
        self._write(PING, ACK, 0, payload)

    def _count_control(self) -> None:
        """Every PING and SETTINGS wants an answer: a flood of them must not fill memory."""
        self._control += 1
        if self._control > self._limits.control_frames:
            raise ProtocolError(ENHANCE_YOUR_CALM, "too many control frames")

    def _on_goaway(self, number: int, flags: int, payload: bytes) -> None:
        self.leaving = True

    def _on_window_update(self, number: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & LAST_STREAM
        if number:
            stream = self.streams.get(number)
            if stream is None:
                if number > self._last:
                    raise ProtocolError(PROTOCOL_ERROR, "a window for a stream that was never opened")
                return
            if not more:
                raise StreamError(PROTOCOL_ERROR)
            self._widen(stream, more)
            return
        if not more:
            raise ProtocolError(PROTOCOL_ERROR, "a window update of 0")
        self._window += more
        if self._window > LARGEST_WINDOW:
            raise ProtocolError(FLOW_CONTROL_ERROR, "a connection window that is too large")
        for stream in [stream for stream in self.streams.values() if stream.pending]:
            self._flush(stream)

    def _widen(self, stream: Stream, more: int) -> None:
        stream.window += more
        if stream.window > LARGEST_WINDOW:
            raise StreamError(FLOW_CONTROL_ERROR)
        if stream.pending:
            self._flush(stream)

    def _on_priority(self, number: int, flags: int, payload: bytes) -> None:
        """Deprecated by RFC 9113, section 5.3: taken and ignored."""

    def _on_push_promise(self, number: int, flags: int, payload: bytes) -> None:
        raise ProtocolError(PROTOCOL_ERROR, "a client does not push")

    # --- ours ------------------------------------------------------------------------------------

    def _greet(self) -> None:
        settings = (
            (_MAX_STREAMS, self._limits.streams),
            (_MAX_HEADER_LIST, self._limits.header_bytes),
            (_INITIAL_WINDOW, DEFAULT_WINDOW),
            (_MAX_FRAME, FRAME),
        )
        self._write(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in settings))
        more = self._limits.connection_window - DEFAULT_WINDOW
        if more > 0:
            self._write(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big"))

    def send(self, stream: Stream, headers: bytes, message: bytes) -> bool:
        """A gRPC message, behind headers (encoded; empty: they were sent). False when some of it has to wait."""
        out = self._out
        if headers:
            out.append(_pack_head(0, len(headers), HEADERS, END_HEADERS, stream.id))
            out.append(headers)
        size = len(message) + 5
        if not stream.pending and size <= stream.window and size <= self._window and size <= self._max_frame:
            stream.window -= size
            self._window -= size
            out.append(_pack_message(size >> 8, size & 0xFF, DATA, 0, stream.id, 0, size - 5))
            out.append(message)
            return True
        stream.pending += _pack_prefix(0, size - 5) + message
        self._flush(stream)
        return not stream.pending

    def send_headers(self, stream: Stream, headers: bytes) -> None:
        """Headers alone (encoded)."""
        self._write(HEADERS, END_HEADERS, stream.id, headers)

    def end(self, stream: Stream, trailers: bytes) -> None:
        """Ends the answer with `trailers` (encoded), behind what waits."""
        if stream.closed:
            return
        if stream.pending:
            stream.trailers = trailers
            return
        self._end(stream, trailers)

    def _end(self, stream: Stream, trailers: bytes) -> None:
        self._write(HEADERS, END_HEADERS | END_STREAM, stream.id, trailers)
        if not stream.remote_ended:  # nothing of the rest of the request is wanted (RFC 9113, section 8.1)
            self._write(RST_STREAM, 0, stream.id, NO_ERROR.to_bytes(4, "big"))
        if self._resets:
            self._resets -= 1
        self._drop(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """Breaks the answer off."""
        if not stream.closed:
            self._write(RST_STREAM, 0, stream.id, code.to_bytes(4, "big"))
            self._drop(stream)

    def release(self, stream: Stream) -> None:
        """What came on the stream has been used: as much may follow."""
        if stream.remote_ended or stream.closed or stream.held < DEFAULT_WINDOW >> 1:
            return
        self._write(WINDOW_UPDATE, 0, stream.id, stream.held.to_bytes(4, "big"))
        stream.receive_window += stream.held
        stream.held = 0

    def relax(self) -> None:
        """A second has passed: some more resets are not the mark of an attack."""
        self._resets = max(0, self._resets - self._limits.resets // 10)

    def ping(self) -> None:
        """Asks whether the peer is still there; `pinged` until it answers."""
        self.pinged = True
        self._write(PING, 0, 0, b"\0" * 8)

    def announce_end(self) -> None:
        """Says that no more requests should be sent; those that are on their way are still taken."""
        if not self.leaving and not self.failed:
            self.leaving = True
            self._write(GOAWAY, 0, 0, LAST_STREAM.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big"))

    def refuse_new(self) -> None:
        """From now on new streams are refused, in a way that tells clients to send them elsewhere."""
        if not self.failed and self._refuse_above == LAST_STREAM:
            self._refuse_above = self._last
            self._write(GOAWAY, 0, 0, self._last.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big"))

    def _fail(self, error: ProtocolError) -> None:
        self.failed = str(error)
        if self.spoke:
            text = self.failed.encode()
            self._write(GOAWAY, 0, 0, self._last.to_bytes(4, "big") + error.code.to_bytes(4, "big") + text)
        else:
            self._out[:] = [
                b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n\r\nThis port speaks gRPC.\n"
            ]
        self.lose()

    def lose(self) -> None:
        """The connection is gone, with all its streams."""
        self.failed = self.failed or "the connection was closed"
        for stream in list(self.streams.values()):
            self._drop(stream)
            self._events.on_reset(stream)

    def _break_stream(self, number: int, code: int) -> None:
        self._write(RST_STREAM, 0, number, code.to_bytes(4, "big"))
        self._count_reset()
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)
            self._events.on_reset(stream)

    def _drop(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        stream.closed = True
        stream.pending = b""

    def _flush(self, stream: Stream) -> None:
        """Sends what waits, as far as the windows allow."""
        data, at = stream.pending, 0
        while at < len(data):
            size = min(len(data) - at, stream.window, self._window, self._max_frame)
            if size <= 0:
                break
            stream.window -= size
            self._window -= size
            self._write(DATA, 0, stream.id, data[at : at + size])
            at += size
        stream.pending = data[at:]
        if stream.pending:
            return
        if stream.trailers is not None:
            self._end(stream, stream.trailers)
        self._events.on_writable(stream)

    def _write(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(_pack_head(size >> 8, size & 0xFF, kind, flags, number) + payload)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]

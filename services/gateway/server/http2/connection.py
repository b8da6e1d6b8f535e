"""A server's end of an HTTP/2 connection (RFC 9113), as gRPC needs it: bytes in, events and bytes out. Pure.

    bytes ──receive──▶ Connection ──▶ events: on_headers, on_data, on_reset, on_writable
      ▲                    │
      └──── take() ◀───────┘◀── send, end, reset, release, ping, announce_end (`Sender`)

    a stream        open ──END_STREAM──▶ half closed (remote) ──our END_STREAM──▶ gone
                      └─────────────── RST_STREAM, either way ──────────────────▶ gone

Invariants: never more than the peer's windows and frame size allow is sent; what does not fit waits in its
stream, in order, and the sender is told to wait; what the peer may send is bounded by `FrameLimits`, its frames by what
they cost (`WorkBudget`), and what it asks for is not read while it does not read what it has asked for before
(`unread`).
"""

from services.gateway.server.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    LAST_STREAM,
    MAX_FRAME,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Events,
    FrameLimits,
    ProtocolError,
    Stream,
    StreamError,
    read_head,
    unpadded,
)
from services.gateway.server.http2.hpack import HeaderDecoder, HeadersTooLarge
from services.gateway.server.http2.sender import CALL_WORK, Sender
from services.gateway.server.work import TURN
from shared.limits import GRPC_WORK

HEADER_BYTES_PER_UNIT = 16  # size of headers, as HPACK counts it, that takes a unit of work to decode


class Http2Connection(Sender):
    """`receive` raises nothing: after a fault `failed` is set, and what there is to take says goodbye.

    After `take`, where `unread` is set and `buffered` is small: `receive` again, with nothing, in a later turn.
    """

    def __init__(self, events: Events, limits: FrameLimits) -> None:
        super().__init__(events, limits)
        self._rest = b""
        self._decoder = HeaderDecoder(limits.unread_header_bytes)
        self._receive_window = limits.connection_window
        self._demanded: int | None = SETTINGS  # the kind that the next frame must be of; None: any
        # Stream, flags and parts of headers that go on in CONTINUATION frames.
        self._continued: tuple[int, int, list[bytes]] | None = None
        # Whether frames of the peer wait for its reading what it was answered, or for their turn.
        self.unread = False
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

    # --- the peer's bytes ------------------------------------------------------------------------

    def receive(self, data: bytes = b"") -> None:
        """Takes what has come; nothing: goes on with what waits."""
        if self.failed:
            return
        buffer = self._rest + data if self._rest else data
        try:
            self._rest = self._read(buffer)
        except ProtocolError as error:
            self._rest = b""
            self.fail(error.code, str(error))

    def _read(self, buffer: bytes) -> bytes:
        """Reads whole frames; returns what is left."""
        at, end = 0, len(buffer)
        self.unread = False
        if not self.spoke:
            at = self._read_preface(buffer)
            if not at:
                return buffer
        work = self.work
        enough = work.spent + TURN
        while end - at >= 9 and not self.failed:
            if work.spent >= enough or self._said + self.buffered > self._limits.unread:
                self.unread = True
                break
            high, low, kind, flags, number = read_head(buffer, at)
            length = high << 8 | low
            if length > FRAME:
                raise ProtocolError(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if end - at - 9 < length:
                break
            payload = buffer[at + 9 : at + 9 + length]
            at += 9 + length
            work.spent += 1
            self._handle(kind, number & LAST_STREAM, flags, payload)
            if work.spent > work.limit:
                cited = GRPC_WORK.cited(work.limit)
                raise ProtocolError(ENHANCE_YOUR_CALM, f"frames that cause too much work ({cited})")
        return buffer[at:] if at else buffer

    def _handle(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        if self._demanded is not None and kind != self._demanded:
            missing = "SETTINGS behind the preface" if self._demanded == SETTINGS else "the rest of headers"
            raise ProtocolError(PROTOCOL_ERROR, f"another frame in place of {missing}")
        handle = self._frames.get(kind)
        if handle is not None:
            try:
                handle(number, flags, payload)
            except StreamError as error:
                self._break_stream(number, error.code)

    def _read_preface(self, buffer: bytes) -> int:
        """Its size, 0 as long as it is not whole."""
        if not PREFACE.startswith(buffer[: len(PREFACE)]):
            raise ProtocolError(PROTOCOL_ERROR, "this port speaks gRPC, which is HTTP/2")
        if len(buffer) < len(PREFACE):
            return 0
        self.spoke = True
        self._greet()
        return len(PREFACE)

    def _on_headers(self, number: int, flags: int, payload: bytes) -> None:
        if not number:
            raise ProtocolError(PROTOCOL_ERROR, "headers on stream 0")
        payload = unpadded(flags, payload)
        if flags & PRIORITY_FLAG:
            if len(payload) < 5:
                raise ProtocolError(FRAME_SIZE_ERROR, "headers too short for their priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._headers_complete(number, flags, payload)
        else:
            self._demanded, self._continued = CONTINUATION, (number, flags, [payload])

    def _on_continuation(self, number: int, flags: int, payload: bytes) -> None:
        if self._continued is None or self._continued[0] != number:
            raise ProtocolError(PROTOCOL_ERROR, "a continuation of nothing")
        _, first_flags, parts = self._continued
        parts.append(payload)
        if len(parts) > 64 or sum(map(len, parts)) > self._limits.unread_header_bytes:
            raise ProtocolError(ENHANCE_YOUR_CALM, "headers of too many bytes")
        if flags & END_HEADERS:
            self._demanded = self._continued = None
            self._headers_complete(number, first_flags, b"".join(parts))

    def _headers_complete(self, number: int, flags: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block)
        except HeadersTooLarge:
            raise ProtocolError(ENHANCE_YOUR_CALM, "headers too large") from None
        except ValueError as error:
            raise ProtocolError(COMPRESSION_ERROR, f"headers that cannot be read: {error}") from None
        cost = headers.size // HEADER_BYTES_PER_UNIT
        self.work.charge(cost)
        stream = self.streams.get(number)
        ended = bool(flags & END_STREAM)
        if stream is not None:  # trailers: gRPC clients send none, and nothing in them counts
            if stream.remote_ended:
                raise StreamError(STREAM_CLOSED)
            if not ended or not headers.are_trailers or stream.content_left:
                raise StreamError(PROTOCOL_ERROR)
            stream.remote_ended = True
            self._events.on_data(stream, b"", True)
            return
        if not number & 1:
            raise ProtocolError(PROTOCOL_ERROR, "a client's stream has an odd number")
        if number <= self._last:
            return  # of a stream that has gone: its headers had to be read for the table's sake
        self._last = number
        if number > self._refuse_above or len(self.streams) >= self._limits.streams:
            self._write(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big"))
            self.work.charge(CALL_WORK)
            return
        content = headers.content_length
        if not headers.are_of_request or (ended and content):
            raise StreamError(PROTOCOL_ERROR)
        stream = self.streams[number] = Stream(number, self._initial_window, work=cost)
        stream.remote_ended, stream.content_left = ended, content
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
        stream.held += size
        ended = bool(flags & END_STREAM)
        stream.remote_ended = ended
        content = unpadded(flags, payload)
        if stream.content_left is not None:
            stream.content_left -= len(content)
            if stream.content_left < 0 or (ended and stream.content_left):
                raise StreamError(PROTOCOL_ERROR)
        self._events.on_data(stream, content, ended)

    def _on_rst_stream(self, number: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(FRAME_SIZE_ERROR, "a RST_STREAM of another size than 4")
        if not number or number > self._last:
            raise ProtocolError(PROTOCOL_ERROR, "the reset of a stream that was never opened")
        self.work.charge(CALL_WORK)
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)
            self._events.on_reset(stream)

    def _on_settings(self, number: int, flags: int, payload: bytes) -> None:
        _on_stream_0(number, "SETTINGS")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed SETTINGS")
        self._demanded = None
        if flags & ACK:
            return
        self.work.charge(len(payload) // 6)
        self._write(SETTINGS, ACK, 0, b"")  # before what larger windows let go
        given = {payload[at : at + 2]: payload[at + 2 : at + 6] for at in range(0, len(payload), 6)}
        for name, value in given.items():  # of a name that comes twice the last counts (RFC 9113, 6.5.3)
            self._set(int.from_bytes(name, "big"), int.from_bytes(value, "big"))

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW:
            if value > LARGEST_WINDOW:
                raise ProtocolError(FLOW_CONTROL_ERROR, "an initial window that is too large")
            change, self._initial_window = value - self._initial_window, value
            self.work.charge(len(self.streams))
            try:
                for stream in list(self.streams.values()):
                    self._widen(stream, change)
            except StreamError as error:
                raise ProtocolError(error.code, "an initial window that is too large") from None
        elif name == MAX_FRAME:
            if not FRAME <= value < 1 << 24:
                raise ProtocolError(PROTOCOL_ERROR, "a frame size out of range")
            self._max_frame = value
        elif name == ENABLE_PUSH and value > 1:
            raise ProtocolError(PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")

    def _on_ping(self, number: int, flags: int, payload: bytes) -> None:
        _on_stream_0(number, "PING")
        if len(payload) != 8:
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed PING")
        if flags & ACK:
            self.pinged = False
            return
        self._write(PING, ACK, 0, payload)

    def _on_goaway(self, number: int, flags: int, payload: bytes) -> None:
        _on_stream_0(number, "GOAWAY")
        if len(payload) < 8:
            raise ProtocolError(FRAME_SIZE_ERROR, "malformed GOAWAY")
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
        while self._window > 0 and self._waiting:  # each turn sends something, and ends one of the two
            self.work.charge(1)
            self._flush(next(iter(self._waiting.values())))

    def _on_priority(self, number: int, flags: int, payload: bytes) -> None:
        """Deprecated by RFC 9113, section 5.3: what is well-formed is ignored."""
        if not number:
            raise ProtocolError(PROTOCOL_ERROR, "a priority of stream 0")
        if len(payload) != 5:
            if number not in self.streams:
                raise ProtocolError(FRAME_SIZE_ERROR, "malformed PRIORITY")
            raise StreamError(FRAME_SIZE_ERROR)

    def _on_push_promise(self, number: int, flags: int, payload: bytes) -> None:
        raise ProtocolError(PROTOCOL_ERROR, "a client does not push")


def _on_stream_0(number: int, kind: str) -> None:
    if number:
        raise ProtocolError(PROTOCOL_ERROR, f"{kind} on a stream")

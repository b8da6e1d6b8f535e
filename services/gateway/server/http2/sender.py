"""What a server says on an HTTP/2 connection: within the peer's windows, in order, and no more. Pure."""

import math
import struct

from services.gateway.server.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    LAST_STREAM,
    MAX_FRAME,
    MAX_HEADER_LIST,
    MAX_STREAMS,
    NO_ERROR,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Events,
    FrameLimits,
    Stream,
    StreamError,
    pack_head,
    pack_message,
    pack_prefix,
)
from services.gateway.server.work import WorkBudget
from shared import limits

CALL_WORK = 100  # units of work of a call that is refused or reset
MESSAGE_EARNS = 2  # units of work that a message to the peer makes up for: windows and PINGs follow it


class Sender:
    """The half of a connection that writes."""

    def __init__(self, events: Events, found: FrameLimits) -> None:
        self._events = events
        self._limits = found
        self._out: list[bytes] = []
        self._said = 0  # bytes of `_out`
        self.buffered = 0  # bytes that were taken and that the peer does not read; whoever takes them says so
        # Streams of which something waits for the connection's window alone.
        self._waiting: dict[int, Stream] = {}
        self._held_back = 0  # bytes that wait for a window, the connection's or their stream's
        # When it was found that the connection's window is closed; None: something went since.
        self._stalled_since: float | None = None
        self.streams: dict[int, Stream] = {}
        self.failed = ""  # why the connection ended
        self.is_calmed = False  # whether it did for asking too much
        self.spoke = False  # whether the peer has sent its preface
        self.leaving = False  # whether one of the two has said that it ends
        self.pinged = False  # whether a PING of ours is unanswered
        self._window = DEFAULT_WINDOW  # bytes that the peer takes on all streams together now
        self._initial_window = DEFAULT_WINDOW
        self._max_frame = FRAME
        self._last = 0  # the newest stream of the peer
        self._refuse_above = LAST_STREAM
        self.work = WorkBudget(found.work)  # what the peer's frames have cost
        self._messages = 0  # messages to the peer since `relax`

    def take(self) -> bytes:
        """What is to be written now."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self._said = 0
        return data

    @property
    def owed(self) -> int:
        """Bytes of answers that the peer has not read."""
        return self._said + self.buffered + self._held_back

    def _greet(self) -> None:
        settings = (
            (MAX_STREAMS, self._limits.streams),
            (MAX_HEADER_LIST, self._limits.header_bytes),
            (INITIAL_WINDOW, DEFAULT_WINDOW),
            (MAX_FRAME, FRAME),
        )
        self._write(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in settings))
        more = self._limits.connection_window - DEFAULT_WINDOW
        if more > 0:
            self._write(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big"))

    def send(self, stream: Stream, headers: bytes, message: bytes) -> bool:
        """A gRPC message, behind headers (encoded; empty: they were sent). False when some of it has to wait."""
        out = self._out
        size = len(message) + 5
        self._messages += 1
        if self.owed > self._limits.owed:
            owed = limits.GRPC_OWED.cited(self._limits.owed)
            self.fail(ENHANCE_YOUR_CALM, f"too many bytes of answers that are not read ({owed})")
            return False
        if headers:
            out.append(pack_head(0, len(headers), HEADERS, END_HEADERS, stream.id))
            out.append(headers)
            self._said += len(headers) + 9
        if not stream.pending and size <= stream.window and size <= self._window and size <= self._max_frame:
            stream.window -= size
            self._window -= size
            out.append(pack_message(size >> 8, size & 0xFF, DATA, 0, stream.id, 0, size - 5))
            out.append(message)
            self._said += size + 9
            return True
        stream.pending = stream.pending[stream.sent :] + pack_prefix(0, size - 5) + message
        stream.sent = 0
        self._held_back += size
        self._flush(stream)
        return not stream.pending

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
        self._drop(stream)
        if stream.refused:
            self.work.charge(CALL_WORK)
        else:
            self.work.refund(CALL_WORK)

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

    def charge(self, stream: Stream, work: int) -> None:
        """For a message of the peer; `excuse` gives it back."""
        self.work.charge(work)
        stream.work += work

    def excuse(self, stream: Stream) -> None:
        """The call is let in, or begins: what it has cost until now was no waste."""
        self.work.refund(stream.work)
        stream.work = 0

    def relax(self) -> None:
        """A second has passed: some more resets are not the mark of an attack, nor are some more PINGs."""
        self.work.refund(self.work.per_second + MESSAGE_EARNS * self._messages)
        self._messages = 0

    def end_stalled(self, now: float, seconds: float) -> int:
        """Ends what holds answers back that the peer's windows have let nothing through of for so many seconds: a
        stream, or the connection where it is the connection's window. `now`: of any clock, asked now and then.
        Returns how many streams were ended; 1: the connection."""
        if self._window > 0 or not self._waiting:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since > seconds:
            cited = limits.GRPC_KEEPALIVE.cited(math.ceil(seconds))
            self.fail(ENHANCE_YOUR_CALM, f"answers that are not read ({cited})")
            return 1
        overdue = []
        for stream in self.streams.values():
            if not stream.pending or stream.window > 0:
                continue
            if stream.stalled_since is None:
                stream.stalled_since = now
            elif now - stream.stalled_since > seconds:
                overdue.append(stream.id)
        for number in overdue:
            self._break_stream(number, ENHANCE_YOUR_CALM)
        return len(overdue)

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

    def fail(self, code: int, reason: str) -> None:
        """Ends the connection, and tells the peer why."""
        if self.failed:
            return
        self.failed = reason
        self.is_calmed = code == ENHANCE_YOUR_CALM
        if self.spoke:
            self._write(GOAWAY, 0, 0, self._last.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode())
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
        """Opening and resetting streams costs the peer nothing and us a request (CVE-2023-44487): an answer that we
        complete pays for one."""
        self._write(RST_STREAM, 0, number, code.to_bytes(4, "big"))
        self.work.charge(CALL_WORK)
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)
            self._events.on_reset(stream)

    def _drop(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self._waiting.pop(stream.id, None)
        self._held_back -= len(stream.pending) - stream.sent
        stream.closed = True
        stream.pending = b""
        stream.sent = 0

    def _flush(self, stream: Stream) -> None:
        """Sends what waits, as far as the windows allow; it then waits for the connection's, or for its own."""
        data, at = stream.pending, stream.sent
        while at < len(data):
            size = min(len(data) - at, stream.window, self._window, self._max_frame)
            if size <= 0:
                break
            stream.window -= size
            self._window -= size
            self._write(DATA, 0, stream.id, data[at : at + size])
            at += size
        if at > stream.sent:
            self._stalled_since = stream.stalled_since = None
        self._held_back -= at - stream.sent
        stream.sent = at
        if at < len(data):
            if stream.window > 0:
                self._waiting[stream.id] = stream
            else:
                self._waiting.pop(stream.id, None)
            return
        stream.pending, stream.sent = b"", 0
        self._waiting.pop(stream.id, None)
        if stream.trailers is not None:
            self._end(stream, stream.trailers)
        self._events.on_writable(stream)

    def _write(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(pack_head(size >> 8, size & 0xFF, kind, flags, number) + payload)
        self._said += size + 9

    def _widen(self, stream: Stream, more: int) -> None:
        stream.window += more
        if stream.window > LARGEST_WINDOW:
            raise StreamError(FLOW_CONTROL_ERROR)
        if stream.pending:
            self._flush(stream)

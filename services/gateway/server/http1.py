"""uvicorn's HTTP protocol with limits: a head in time and of a size, so many connections, so much pipelining.

    nothing yet ──▶ head ──▶ body ──▶ answer ──▶ kept alive ──▶ head ...
    ╰── head_seconds ──╯     ╰ body_timeout,     ╰ uvicorn's keep-alive; once anything comes,
        head_bytes             in core/asgi.py      head_seconds again

What is refused here never becomes a request: it is answered in OpenAI's shape, and the connection ends.

A client may end its half of the connection behind its request (a half-close) and still read the answer. From one that
has gone altogether it cannot be told apart but by writing to it: an interim answer (100 Continue), which every client
of HTTP/1.1 takes and drops (RFC 9110, 15.2), is refused by the system of one that has gone. Once the answer has begun
there is nothing left to ask with, and a client that ends its half is taken for gone: its place is others'.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.core.asgi import CONNECTION
from services.gateway.server.connections import (
    EXPECTATION,
    HOST,
    INVALID,
    NO_HANDSHAKE,
    PIPELINED,
    VERSION,
    ConnectionLimiter,
    ConnectionLimits,
    ConnectionRefusal,
    full,
    large,
    slow,
)
from shared.limits import HEADERS
from shared.limits import PIPELINED as MOST_PIPELINED
from shared.service.endpoints import OpsApp

log = structlog.get_logger(__name__)

# Seconds for which what a refused client still sends is read and dropped: else it could not read the answer.
LINGER = 1.0
# Seconds after a half-close until it is looked whether the client has gone, and between two looks.
FIRST_LOOK, NEXT_LOOK = 0.05, 0.5
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_OPS = tuple(path.encode() for path in OpsApp.paths)


_REASONS = {408: "slow", 431: "large", 503: "full"}  # what metrics call refusals of these statuses


class _Refused(Exception):
    """Stops the parser."""


class _Pipeline(list[Any]):
    """What uvicorn asks of a deque, which takes 760 bytes before anything is in it; bounded by `MOST_PIPELINED`."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        self.insert(0, item)


def _shrink(event: asyncio.Event) -> None:
    """A list does where few ever wait, for what a deque takes."""
    event._waiters = []  # type: ignore[assignment]  # noqa: SLF001


class GuardedHttp(HttpToolsProtocol):
    """One connection. It takes as little memory as it can, for thousands are open and idle: uvicorn's deques and
    attributes in a dictionary would take half as much again."""

    limits: ClassVar[ConnectionLimits]
    door: ClassVar[ConnectionLimiter]

    # Not in the dictionary, whose keys all connections share as long as they are no more than 30.
    __slots__ = (
        "_declined",
        "_ended",
        "_gone",
        "_head_count",
        "_head_size",
        "_hosts",
        "_in_head",
        "_looking",
        "_progressed",
        "_refusal",
        "_running",
        "_spare",
        "_timer",
        "_unfinished",
        "body_held",
    )

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self.body_held = 0  # bytes of a body that the application has read and waits for the rest of
        self._refusal: ConnectionRefusal | None = None
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_size = 0
        self._head_count = 0
        self._hosts = 0
        self._spare = False  # whether it has one of the places that are reserved
        self._looking: asyncio.TimerHandle | None = None  # there once the client has ended its half
        self._unfinished = 0  # bytes that came since the parser last had something whole
        self._progressed = False
        self._declined = False  # whether the request offers a protocol that is not spoken here
        # What the request that is being answered has called when its client goes.
        self._gone: Callable[[], None] | None = None
        # The request that is being answered; uvicorn's `cycle` is the one that was read last.
        self._running: RequestResponseCycle | None = None

    # --- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _shrink(self.flow._is_writable_event)  # noqa: SLF001
        self.door.opened(self)
        self._spare = self.door.full
        if self.door.overfull:
            self._refuse(full(self.door.sentence))
        else:
            self._mind_the_time()

    @property
    def owed(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

    @property
    def arriving(self) -> int:
        """Bytes of request bodies that have not come whole, or that nobody has read."""
        cycles = [self.cycle] if self.cycle is not None else []
        cycles += [cycle for cycle, _ in self.pipeline]
        return self.body_held + sum(len(cycle.body) for cycle in cycles)

    def abort(self) -> None:
        """Waits no longer for the client to read."""
        self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Whether the connection stays open for the answers that are under way."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._ended:
            return None
        if self.scheme != "http" or self.scope["http_version"] == "1.0":
            return None  # TLS cannot end one way alone; of HTTP/1.0, who has gone could not be told
        if self._running is None or self._running.response_started:
            return None
        cycle.keep_alive = False
        self.transport.write(_CONTINUE)
        self._looking = self.loop.call_later(FIRST_LOOK, self._look)
        return True

    def _look(self) -> None:
        """Whether the system of the client has refused what was written."""
        self._looking = self.loop.call_later(NEXT_LOOK, self._look)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._looking is not None:
            self._looking.cancel()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        self._progressed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as end:
            self._upgrade(data[end.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or INVALID)
            return
        self._unfinished = 0 if self._progressed else self._unfinished + len(data)
        if self._unfinished > self.limits.head_bytes:
            self._refuse(large(self.limits))
        else:
            self._mind_the_time()

    def _upgrade(self, rest: bytes) -> None:
        """`rest` came behind the head of a request that would like to speak another protocol."""
        self._cancel_timer()
        if self._declined:
            self._read_as_it_is(rest)
            return
        if not self._should_upgrade():
            return  # CONNECT, which has been answered
        self.handle_websocket_upgrade()
        protocol: Any = self.transport.get_protocol()
        if not protocol.handshake_initiated:
            protocol.connections.discard(protocol)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self._refuse(NO_HANDSHAKE)

    def _read_as_it_is(self, rest: bytes) -> None:
        """An offer that is not taken changes nothing (RFC 9110, 7.8), but the parser would drop the body.

        Java's HttpClient and `curl --http2` offer h2c with every request.
        """
        self._declined = False
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode(), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    # --- time ------------------------------------------------------------------------------------

    @property
    def _awaited(self) -> bool:
        """Whether it is the client's turn, and not because an answer has just ended."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.pipeline and self.timeout_keep_alive_task is None

    def _mind_the_time(self) -> None:
        """From its first byte on, not from its last: one byte now and then buys no time."""
        if not self._awaited:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if not self._awaited or self._ended:
            return
        if self._unfinished or bool(self.cycle):
            self._refuse(slow(self.limits))
        else:
            self.transport.close()  # nothing was asked: nothing is answered

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the parser's news -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_size = self._head_count = self._hosts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_count += 1
        self._grow(len(name) + len(value))
        if self._in_head:  # a trailer is no header: it came after what it would change
            super().on_header(name, value)
            lower = self.headers[-1][0]
            if lower == b"host":
                self._hosts += 1
            elif lower == b"expect" and not self.expect_100_continue:
                self._stop(EXPECTATION)

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.head_bytes or self._head_count > HEADERS.value:
            self._stop(large(self.limits))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progressed = True
        self._check_head()
        if self.parser.should_upgrade() and self._get_upgrade() not in (None, b"websocket"):
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self._declined = True
            return
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED.value:
            self._stop(PIPELINED)

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._stop(VERSION)
        if self._hosts > 1 or (not self._hosts and version == "1.1"):
            self._stop(HOST)
        if self._spare and self.url.partition(b"?")[0] not in _OPS:
            self._spare = self.door.full
            if self._spare:
                self._stop(full(self.door.sentence))

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._progressed = True

    def on_message_complete(self) -> None:
        self._progressed = True
        if not self._declined:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running, self._gone = cycle, None
        extensions: Any = {CONNECTION: _Connection(self, cycle)}
        cycle.scope["extensions"] = extensions
        _shrink(cycle.message_event)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._running is not None:
            # It has the request, and the request has it: nothing but the garbage collector would free the two.
            self._running.scope.pop("extensions", None)
        super().on_response_complete()

    def watch(self, cycle: RequestResponseCycle, gone: Callable[[], None] | None) -> None:
        """`Connection.watch`, of one answer."""
        if cycle is self._running:
            self._gone = gone
        if gone is not None:
            self.flow.resume_reading()  # a body that came whole may have paused it; who goes is read
            if cycle.disconnected:
                gone()

    # --- the end ---------------------------------------------------------------------------------

    def _stop(self, refusal: ConnectionRefusal) -> None:
        self._refusal = refusal
        raise _Refused

    def _abandon(self) -> None:
        """Nobody waits for what is being answered, nor for what should have come after it."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._gone is not None:
                self._gone()

    def _refuse(self, refusal: ConnectionRefusal) -> None:
        """Says why, unless an answer is being written, and ends the connection."""
        self._ended = True
        self._cancel_timer()
        if self.transport.is_closing():
            return
        log.info("connection_refused", code=refusal.code, status=refusal.status)
        self.door.refused("http", _REASONS.get(refusal.status, "invalid"))
        self._abandon()
        if self._running is not None and self._running.response_started and not self._running.response_complete:
            self.transport.close()
            return
        self.transport.write(refusal.response())
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.close)
        else:  # TLS cannot end one way alone
            self.transport.close()


class _Connection:
    """`asgi.Connection`, of one answer."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: GuardedHttp, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def body(self) -> bytes | None:
        cycle = self._cycle  # as its `receive` where that would not wait
        if cycle.more_body or cycle.disconnected or cycle.response_complete or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def write(self, part: bytes) -> bool:
        cycle = self._cycle  # as its `send` where that would not wait
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def hold(self, size: int) -> None:
        self._protocol.body_held = size

    def watch(self, gone: Callable[[], None] | None) -> None:
        self._protocol.watch(self._cycle, gone)


def guarded_http(limits: ConnectionLimits, door: ConnectionLimiter) -> type[GuardedHttp]:
    """The protocol for a server with these limits, whose connections come in by `door`."""
    return type("GuardedHttp", (GuardedHttp,), {"limits": limits, "door": door})

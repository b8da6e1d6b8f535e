"""uvicorn's HTTP protocol with limits: a head in time and of a size, so many connections, so much pipelining.

    nothing yet ──▶ head ──▶ body ──▶ answer ──▶ kept alive ──▶ head ...
    ╰── head_seconds ──╯     ╰ body_timeout,     ╰ uvicorn's keep-alive; once anything comes,
        head_bytes             in http_io.py       head_seconds again

What is refused here never becomes a request: it is answered in OpenAI's shape, and the connection ends.
"""

import asyncio
from typing import Any, ClassVar

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.connections.limits import (
    FULL,
    INVALID,
    LARGE,
    NO_HANDSHAKE,
    PIPELINED,
    RESERVED,
    SLOW,
    Limits,
    Refusal,
)
from shared.limits import HEADERS
from shared.limits import PIPELINED as MOST_PIPELINED
from shared.telemetry import OpsApp

log = structlog.get_logger(__name__)

LINGER = 1.0
"""Seconds for which what a refused client still sends is read and dropped: else it could not read the answer."""
_OPS = tuple(path.encode() for path in OpsApp.paths)


class _Refused(Exception):
    """Stops the parser."""


class GuardedHttp(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[Limits]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._refusal: Refusal | None = None
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_size = 0
        self._head_count = 0
        self._unfinished = 0
        """Bytes that came since the parser last had something whole."""
        self._progressed = False
        self._declined = False
        """Whether the request offers a protocol that is not spoken here."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; uvicorn's `cycle` is the one that was read last."""

    # --- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections + RESERVED:
            self._refuse(FULL)
        else:
            self._mind_the_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
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
            self._refuse(LARGE)
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
            self._refuse(SLOW)
        else:
            self.transport.close()  # nothing was asked: nothing is answered

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the parser's news -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_size = self._head_count = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_count += 1
        self._grow(len(name) + len(value))
        if self._in_head:  # a trailer is no header: it came after what it would change
            super().on_header(name, value)

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.head_bytes or self._head_count > HEADERS.value:
            self._stop(LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progressed = True
        if len(self.connections) > self.limits.connections and self.url.partition(b"?")[0] not in _OPS:
            self._stop(FULL)
        if self.parser.should_upgrade() and self._get_upgrade() not in (None, b"websocket"):
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self._declined = True
            return
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED.value:
            self._stop(PIPELINED)

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
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # --- the end ---------------------------------------------------------------------------------

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Refused

    def _abandon(self) -> None:
        """Nobody waits for what is being answered, nor for what should have come after it."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _refuse(self, refusal: Refusal) -> None:
        """Says why, unless an answer is being written, and ends the connection."""
        self._ended = True
        self._cancel_timer()
        if self.transport.is_closing():
            return
        log.info("connection_refused", code=refusal.code, status=refusal.status)
        self._abandon()
        if (
            self._running is not None
            and self._running.response_started
            and not self._running.response_complete
        ):
            self.transport.close()
            return
        self.transport.write(refusal.response())
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.close)
        else:  # TLS cannot end one way alone
            self.transport.close()


def guarded_http(limits: Limits) -> type[GuardedHttp]:
    """The protocol for a server with these limits."""
    return type("GuardedHttp", (GuardedHttp,), {"limits": limits})

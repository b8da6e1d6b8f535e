"""The gRPC server: connections on a socket, and a task for each call, with its span."""

import asyncio
import math
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, cast

import structlog
from google.rpc.code_pb2 import Code

from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.framing import MessageReader
from services.gateway.api.grpc.status import code_of
from services.gateway.core.errors import ClientGone, RequestTimeout, RouteError
from services.gateway.intake.headers import check_request_id
from services.gateway.server.connections import ConnectionLimiter
from services.gateway.server.http2.connection import Http2Connection
from services.gateway.server.http2.frames import ENHANCE_YOUR_CALM, FrameLimits, Stream
from services.gateway.server.http2.hpack import Headers, refusal
from shared import limits, tracing
from shared.errors import ConfigurationError, DeadlineExceeded, PayloadTooLarge, QueueFull, Unavailable
from shared.service.listener import Listener
from shared.tasks import TaskSet
from shared.tracing import Span

_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))


def begin_call(call: GrpcCall) -> Span:
    """Continues the trace that the call's metadata names; the trailers name it (`traceresponse`)."""
    remote = tracing.parse(call.metadata("traceparent"), call.metadata("tracestate"))
    method = call.headers.path.lstrip("/")[:256]
    span = tracing.begin(
        method,
        remote,
        attributes={"rpc.system.name": "grpc", "rpc.method": method, "ryzanstein.request_id": call.request_id},
    )
    if span.recording:
        call.trailing["traceresponse"] = span.traceparent
    return span


def end_call(span: Span, call: GrpcCall) -> None:
    if not span.recording:
        return
    error = call.error
    status = Code.Name(0 if error is None else code_of(error))
    span.set({"rpc.response.status_code": status, "gen_ai.request.model": call.model})
    if status in _FAULTS:
        span.fail(status)
    span.end()


SWEEP = 1.0  # seconds between two looks at all connections
LINGER = 2.0  # seconds that a client which has broken the protocol gets to read why its connection ends


class RpcMethod(NamedTuple):
    """What answers the calls of one path."""

    answer: Callable[[GrpcCall], Awaitable[None]]
    # Whether the client may send several messages; else `answer` is called when its one message is there.
    streamed: bool = False
    public: bool = False  # whether everybody may call it


class ServerOptions(NamedTuple):
    message_limit: int  # bytes of a request message; it is RYZANSTEIN_BODY_LIMIT
    message_timeout: float  # seconds that a client gets to send its message, and the preface of a connection
    keepalive: float  # seconds of silence after which a client is asked whether it is there
    keepalive_timeout: float  # seconds that it has to answer
    # Bytes of request messages on a connection that are not complete, or not taken yet; a message at least.
    untaken: int = limits.GRPC_UNTAKEN.value
    limits: FrameLimits = FrameLimits()


class GrpcServer:
    """Serves `methods` by their paths. `on_done` is told of every call that has ended; `authorize` raises for those
    that are refused."""

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, RpcMethod],
        options: ServerOptions,
        on_done: Callable[[GrpcCall], None],
        authorize: Callable[[GrpcCall], None],
        tls: ssl.SSLContext | None = None,
        door: ConnectionLimiter | None = None,
    ) -> None:
        self.methods = methods
        self.door = door or ConnectionLimiter(sys.maxsize // 2)
        self.options = options
        self.on_done = on_done
        self.authorize = authorize
        self._sock = sock
        self._tls = tls
        host, port = sock.getsockname()[:2]
        # `host:port` that it listens on.
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.peers: set[GrpcConnection] = self.door.grpc
        self.tasks = TaskSet()
        self._listener: Listener | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once connections are accepted."""
        self._listener = Listener(self._sock, lambda: GrpcConnection(self), self._tls, self.door.admission("grpc"))
        try:
            self._listener.start()
        except OSError as error:
            raise ConfigurationError(f"Cannot listen on {self.address}: {error.strerror}.") from None
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop_accepting(self) -> None:
        """No new connections, and clients are told to open no new streams; those that are open go on."""
        if self._listener is not None:
            self._listener.close()
            await asyncio.sleep(0)
        for peer in list(self.peers):
            peer.announce_end()

    async def stop(self, *, grace: float = 2.0) -> None:
        """Waits up to `grace` seconds for calls, then ends everything; twice is safe."""
        await self.stop_accepting()
        if self.tasks:
            await asyncio.wait([*self.tasks], timeout=grace)
        for peer in list(self.peers):
            peer.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self.tasks:
            await asyncio.wait([*self.tasks], timeout=grace)
        for task in list(self.tasks):
            task.cancel()
        for peer in list(self.peers):
            peer.abort()
        if self._listener is not None:
            await self._listener.wait_closed()
        self._sock.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            now = time.perf_counter()
            for peer in list(self.peers):
                peer.sweep(now)


class GrpcConnection(asyncio.Protocol):
    """One connection: the shell of `Http2Connection`, and whose events it takes."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.connection = Http2Connection(self, server.options.limits)
        self.paused = False
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        self._reading = True
        # Bytes that the transport was given, and that it has given to the network.
        self._written = self._delivered = 0
        self._heard = self._opened = self._moved = time.perf_counter()
        self._asked = self._failed = 0.0
        self._held = 0  # bytes of request messages that no method has taken
        self._let_in = False  # whether a call that needs a key has been let in
        self._sent_away = 0.0
        self._spare = False  # whether it has one of the places that are reserved
        self._told = False  # whether it is counted that it failed
        self._going_on = False  # whether it will have its turn to read on

    # --- the transport's -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=self._server.options.limits.unread)
        self._server.peers.add(self)
        self._server.door.opened(self)
        self._spare = self._server.door.full
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard = time.perf_counter()
        self.connection.receive(data)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.peers.discard(self)
        self._transport = None
        self.paused = False
        self.connection.lose()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.connection.buffered = 0
        self._flush()
        for stream in list(self.connection.streams.values()):
            self.on_writable(stream)

    # --- the connection's ------------------------------------------------------------------------

    def on_headers(self, stream: Stream, headers: Headers, ended: bool) -> None:
        refused = _not_grpc(headers)
        if refused:
            stream.refused = True
            self.connection.end(stream, refused)
            return
        call = GrpcCall(self, stream, headers)
        stream.owner = call
        try:
            call.request_id = check_request_id(headers.metadata.get("x-request-id")) or _new_id()
            self._check_size(headers)
            method = self._method(headers.path)
            self._expect(call, method)
            if self._spare and not method.public:
                self._check_place()
            if (timeout := headers.timeout) is not None:
                call.deadline = time.time() + timeout
                call.timer = self._loop.call_later(timeout, self._expire, call)
            if not method.public:
                self._server.authorize(call)
                self._let_in = True
                self.connection.excuse(stream)
            if ended:
                call.feed(b"", True)
            if method.streamed or ended:
                self._begin(stream, call, method)
        except Exception as error:
            call.request_id = call.request_id or _new_id()
            self._refuse(call, error)

    def on_data(self, stream: Stream, data: bytes, ended: bool) -> None:
        call = stream.owner
        assert isinstance(call, GrpcCall)
        try:
            call.feed(data, ended)
            method = self._server.methods[call.headers.path]
            if ended and not method.streamed:
                self._begin(stream, call, method)
        except Exception as error:
            self._refuse(call, error)

    def on_reset(self, stream: Stream) -> None:
        if isinstance(stream.owner, GrpcCall):
            stream.owner.end(ClientGone())

    def on_writable(self, stream: Stream) -> None:
        if isinstance(stream.owner, GrpcCall):
            stream.owner.writable()

    # --- calls -----------------------------------------------------------------------------------

    def hold(self, change: int) -> None:
        """A call holds so many bytes more of messages that its method has not taken. Raises `QueueFull`."""
        self._held += change
        limit = max(self._server.options.untaken, self._server.options.message_limit)
        if change > 0 and self._held > limit:
            raise QueueFull(
                f"The calls of this connection hold {self._held:,} bytes of messages that are not complete; use more "
                f"connections ({limits.GRPC_UNTAKEN.cited(limit)})."
            )

    def _check_place(self) -> None:
        """Raises `Unavailable` as long as there is no place but those that are reserved."""
        self._spare = self._server.door.full
        if self._spare:
            self._server.door.refused("grpc", "full")
            raise Unavailable(self._server.door.sentence, retry_after=1)

    def _check_size(self, headers: Headers) -> None:
        limit = self._server.options.limits.header_bytes
        if headers.size > limit:
            raise PayloadTooLarge(
                f"The call's metadata has {headers.size:,} bytes; send less ({limits.GRPC_METADATA.cited(limit)})."
            )

    def _expect(self, call: GrpcCall, method: RpcMethod) -> None:
        """Raises `QueueFull`."""
        limit, named = self._server.options.message_limit, limits.BODY
        if method.public:
            self._check_public()
            named = limits.GRPC_PUBLIC_MESSAGE
            limit = min(limit, named.value)
            call.public = True
        encoding = call.metadata("grpc-encoding")
        call.expect(MessageReader(limit, encoding, named), single=not method.streamed)

    def _check_public(self) -> None:
        limit = limits.GRPC_PUBLIC_CALLS
        owners = (stream.owner for stream in self.connection.streams.values())
        if sum(1 for owner in owners if isinstance(owner, GrpcCall) and owner.public) >= limit.value:
            raise QueueFull(
                f"This connection has reached its limit of calls without a key; wait for one to end ({limit.cited()})."
            )

    def _method(self, path: str) -> RpcMethod:
        method = self._server.methods.get(path)
        if method is None:
            raise RouteError(
                f"Unknown method: {path[:256]}; server reflection lists what there is.",
                status=501,
                reason="unknown_method",
            )
        return method

    def _begin(self, stream: Stream, call: GrpcCall, method: RpcMethod) -> None:
        if call.finished:
            return
        self.connection.excuse(stream)
        self._server.tasks.spawn(self._run(call, method))

    async def _run(self, call: GrpcCall, method: RpcMethod) -> None:
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        if not tracing.on() or method.public:
            await self._answer(call, method)
            return
        span = begin_call(call)
        try:
            with tracing.active(span):
                await self._answer(call, method)
        finally:
            end_call(span, call)

    async def _answer(self, call: GrpcCall, method: RpcMethod) -> None:
        try:
            await method.answer(call)
        except Exception as error:
            call.finish(error)
        else:
            call.finish(None)
        self._server.on_done(call)

    def _refuse(self, call: GrpcCall, error: Exception) -> None:
        """Ends a call that has not begun, or whose request breaks off; in the latter case its method hears of it."""
        call.refuse(error)
        call.end(error)
        self._server.on_done(call)

    def _expire(self, call: GrpcCall) -> None:
        error = DeadlineExceeded("The deadline of the call has passed; give it more time.")
        call.finish(error)
        call.end(error)

    # --- the shell -------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Writes what there is once in this turn of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self.connection.take()
        transport = self._transport
        if transport is None:
            return
        if data:
            self._written += len(data)
            transport.write(data)
        if self.paused:
            self.connection.buffered = transport.get_write_buffer_size()
        if self.connection.failed or (self.connection.leaving and not self.connection.streams):
            if self.connection.failed and not self._told:
                self._told = True
                self._server.door.refused("grpc", "calm" if self.connection.is_calmed else "protocol")
            transport.close()
        else:
            self._regulate(transport)

    def _regulate(self, transport: asyncio.Transport) -> None:
        """Reads nothing more from who does not read the answers to what it has sent."""
        reads = not self.paused and not self.connection.unread
        if reads != self._reading and not transport.is_closing():
            self._reading = reads
            (transport.resume_reading if reads else transport.pause_reading)()
        if self.connection.unread and not self.paused and not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)  # others take their turns meanwhile

    def _go_on(self) -> None:
        self._going_on = False
        if self.connection.unread and not self.paused:
            self.connection.receive()
            self._flush()

    def announce_end(self) -> None:
        """Tells the client to open no new streams here."""
        self.connection.announce_end()
        self._flush()

    def close(self) -> None:
        """Ends all that is left."""
        self._end_all(Unavailable("The gateway is shutting down; send the request again.", retry_after=1))
        self.connection.refuse_new()
        self._flush()
        if self._transport is not None:
            self._transport.close()

    @property
    def owed(self) -> int:
        """Bytes of answers that the client has not read, those that its windows hold back among them."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.connection.owed - self.connection.buffered + buffered

    @property
    def arriving(self) -> int:
        """Bytes of request messages that no method has taken, most of them because they are not complete."""
        return self._held

    def _end_all(self, error: Unavailable) -> None:
        for stream in list(self.connection.streams.values()):
            if isinstance(stream.owner, GrpcCall):
                stream.owner.finish(error)
                stream.owner.end(error)

    def abort(self) -> None:
        """Waits no longer for the client to read."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """Ends what waits for too long, and asks who is silent whether it is there."""
        options, connection = self._server.options, self.connection
        connection.relax()
        if self._transport is None:
            return
        if self._is_stuck(self._transport, now):
            self._transport.abort()
            return
        if not connection.spoke and now - self._opened > options.message_timeout:
            self._transport.abort()
            return
        self._end_stalled(now)
        self._end_incomplete(now)
        if not self._let_in and now - self._opened > options.keepalive:
            self._send_away(now)
        if connection.pinged:
            if now - self._asked > options.keepalive_timeout:
                self._transport.abort()
        elif now - self._heard > options.keepalive:
            self._asked = now
            connection.ping()
        self._flush()

    def _send_away(self, now: float) -> None:
        """Nobody keeps a connection here without a key: its client is told to go, and may come back."""
        if not self._sent_away:
            self._sent_away = now
            self._server.door.refused("grpc", "no_key")
        self.announce_end()
        if now - self._sent_away > self._server.options.keepalive_timeout:
            limit = limits.GRPC_KEEPALIVE.cited(math.ceil(self._server.options.keepalive))
            self._end_all(Unavailable(f"No call of this connection was admitted; retry on a new one ({limit})."))

    def _is_stuck(self, transport: asyncio.Transport, now: float) -> bool:
        """Whether the client takes nothing of what it is owed, or was told goodbye and does not go."""
        connection, waiting = self.connection, transport.get_write_buffer_size()
        if not waiting or self._written - waiting > self._delivered:
            self._moved = now
        self._delivered = self._written - waiting
        if not connection.failed and now - self._moved > self._server.options.keepalive:
            seconds = limits.GRPC_KEEPALIVE.cited(math.ceil(self._server.options.keepalive))
            connection.fail(ENHANCE_YOUR_CALM, f"answers that are not read ({seconds})")
            self._server.door.refused("grpc", "unread")
            return True
        if not connection.failed:
            return False
        self._failed = self._failed or now
        return now - self._failed > LINGER

    def _end_stalled(self, now: float) -> None:
        ended = self.connection.end_stalled(now, self._server.options.keepalive)
        self._told = self._told or bool(self.connection.failed)
        for _ in range(ended):
            self._server.door.refused("grpc", "unread")

    def _end_incomplete(self, now: float) -> None:
        limit = self._server.options.message_timeout
        for stream in list(self.connection.streams.values()):
            call = stream.owner
            if not isinstance(call, GrpcCall) or call.complete or now - call.began < limit:
                continue
            if not self._server.methods[call.headers.path].streamed:
                self._refuse(call, RequestTimeout(f"The request message was not complete after {limit:g} s."))


def _new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _not_grpc(headers: Headers) -> bytes:
    """What to answer to a request of another protocol; empty for gRPC's (PROTOCOL-HTTP2, "Requests")."""
    if headers.method != "POST":
        return refusal(405, b"gRPC calls are POSTs; the REST API is on another port.")
    if not headers.content_type.startswith("application/grpc"):
        return refusal(415, b"This port takes application/grpc; the REST API is on another port.")
    return b""

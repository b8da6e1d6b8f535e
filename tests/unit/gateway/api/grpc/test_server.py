"""What one connection may be owed: clients that send and do not read, on fake transports and real sockets."""

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.gateway.api.grpc.call import MESSAGE_BYTES, GrpcCall
from services.gateway.api.grpc.framing import MessageReader
from services.gateway.api.grpc.server import GrpcConnection, GrpcServer, RpcMethod, ServerOptions
from services.gateway.core.errors import AuthenticationFailed, ClientGone
from services.gateway.server.http2 import frames as http2
from services.gateway.server.http2.frames import PREFACE, FrameLimits
from services.gateway.server.http2.hpack import literal
from shared.service.listener import bind
from tests.integration.gateway.fake_ring import until
from tests.unit.gateway.server.http2.test_connection import framed, goodbye, http2_frame

METHOD, PUBLIC, SESSION = "/test.Service/Method", "/test.Service/Public", "/test.Service/Session"
GREETING = PREFACE + http2_frame(http2.SETTINGS, 0, 0, b"")
OPTIONS = ServerOptions(message_limit=1 << 20, message_timeout=30.0, keepalive=60.0, keepalive_timeout=20.0)


def head(path: str, *more: tuple[bytes, bytes]) -> bytes:
    given = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    return b"".join(literal(name, value) for name, value in given)


def calls(count: int, path: str = METHOD, *, first: int = 0) -> bytes:
    """Frames of so many calls without a message."""
    block = head(path)
    return b"".join(
        http2_frame(http2.HEADERS, 5, number, block) for number in range(2 * first + 1, 2 * (first + count), 2)
    )


class Transport:
    """One whose peer reads when it is told to."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.waiting = 0
        self.high = 65_536
        self.reading = True
        self.closing = self.aborted = False
        self.protocol: Any = None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: bytes) -> None:
        self.written += data
        self.waiting += len(data)
        if self.waiting > self.high and not self.protocol.paused:
            self.protocol.pause_writing()

    def read(self, size: int = 1 << 30) -> None:
        """The peer reads so many bytes."""
        self.waiting = max(0, self.waiting - size)
        if self.waiting <= self.high // 4 and self.protocol.paused:
            self.protocol.resume_writing()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


class Service:
    """A server's methods, and what has come of their calls."""

    def __init__(self) -> None:
        self.begun: list[GrpcCall] = []
        self.done: list[GrpcCall] = []

    async def answer(self, call: GrpcCall) -> None:
        self.begun.append(call)
        await call.send(b"x" * 100)

    async def never(self, call: GrpcCall) -> None:
        self.begun.append(call)
        while await call.receive() is not None:
            pass

    def refuse(self, call: GrpcCall) -> None:
        if call.metadata("authorization") != "good":
            raise AuthenticationFailed("No key.")

    def server(self, sock: socket.socket, options: ServerOptions) -> GrpcServer:
        methods = {
            METHOD: RpcMethod(self.answer),
            PUBLIC: RpcMethod(self.answer, public=True),
            SESSION: RpcMethod(self.never, streamed=True),
        }
        return GrpcServer(sock, methods, options, self.done.append, self.refuse)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def server(service: Service) -> AsyncIterator[GrpcServer]:
    """One that serves on a real socket."""
    made = service.server(bind("127.0.0.1", 0), OPTIONS)
    await made.start()
    yield made
    await made.stop(grace=0.1)


def connected(server: GrpcServer, said: bytes = GREETING) -> tuple[GrpcConnection, Transport]:
    """A connection without a network."""
    peer, transport = GrpcConnection(server), Transport()
    transport.protocol = peer
    peer.connection_made(cast(asyncio.Transport, transport))
    peer.data_received(said)
    return peer, transport


async def settled() -> None:
    """Everything that is to be done soon has been done."""
    for _ in range(50):
        await asyncio.sleep(0)


# --- a client that does not read -------------------------------------------------------------------


async def test_refused_calls_of_a_client_that_does_not_read_are_not_read_on(server: GrpcServer) -> None:
    peer, transport = connected(server)
    for turn in range(100):
        if transport.reading:
            peer.data_received(calls(200, first=turn * 200))
        await settled()
    assert not transport.reading
    assert transport.waiting < 4 * 65_536
    assert not peer.connection.failed, "it may yet read"
    peer.sweep(1e9)
    peer.sweep(2e9)
    assert transport.aborted


async def test_one_read_of_many_refused_calls_is_answered_piece_by_piece(server: GrpcServer) -> None:
    peer, transport = connected(server)
    peer.data_received(calls(800))
    assert transport.waiting < 2 * 65_536, "the rest waits, and others have their turns"
    assert not transport.reading
    while len(peer.connection.streams) or not transport.reading:
        transport.read()
        await asyncio.sleep(0)
    assert transport.written.count(b"grpc-status\x0216") == 800


async def test_refused_calls_without_end_are_an_attack_also_for_who_reads(server: GrpcServer) -> None:
    peer, transport = connected(server)
    for turn in range(20):
        peer.data_received(calls(100, first=turn * 100))
        while peer.connection.unread:
            transport.read()
            await asyncio.sleep(0)
        transport.read()
    assert "limit grpc_work: 100,000 frames, fixed" in peer.connection.failed
    assert transport.closing
    assert goodbye_in(transport) == http2.ENHANCE_YOUR_CALM


async def test_pings_between_refused_streams_do_not_start_to_count_anew(service: Service) -> None:
    # Not started: no second takes work off, however slow this machine is.
    with bind("127.0.0.1", 0) as sock:
        peer, transport = connected(service.server(sock, OPTIONS))
        peer.data_received(calls(2))
        pings = http2_frame(http2.PING, 0, 0, b"12345678") * 50_000
        for _ in range(2):
            peer.data_received(pings + calls(1))  # a stream that has gone
            while peer.connection.unread and not peer.connection.failed:
                transport.read()
                await asyncio.sleep(0)
        assert "grpc_work" in peer.connection.failed


async def test_pings_second_after_second_are_no_attack(server: GrpcServer) -> None:
    """A client that measures its bandwidth sends one for nearly every message it gets."""
    peer, transport = connected(server)
    for second in range(30):
        peer.data_received(http2_frame(http2.PING, 0, 0, b"12345678") * 1_000)
        transport.read()
        peer.sweep(peer._opened + second)
    assert not peer.connection.failed


async def test_what_waits_for_open_calls_is_bounded_too(service: Service) -> None:
    options = OPTIONS._replace(limits=FrameLimits(owed=100_000))
    server = service.server(bind("127.0.0.1", 0), options)
    peer, transport = connected(server, GREETING + http2_frame(http2.SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff"))

    async def large(call: GrpcCall) -> None:
        await call.send(b"x" * 30_000)

    server.methods = {METHOD: RpcMethod(large, public=True)}
    block = head(METHOD)
    for number in range(1, 21, 2):
        peer.data_received(http2_frame(http2.HEADERS, 4, number, block))
        peer.data_received(http2_frame(http2.DATA, 1, number, framed(b"")))
    await settled()
    assert "limit grpc_owed: 100,000 bytes" in peer.connection.failed
    assert transport.waiting < 200_000
    await server.stop(grace=0.1)
    assert all(call.finished for call in service.done)


async def test_messages_are_written_at_once_while_the_client_has_room(service: Service) -> None:
    server = service.server(bind("127.0.0.1", 0), OPTIONS)
    peer, transport = connected(server)
    written = 0

    async def stream(call: GrpcCall) -> None:
        nonlocal written
        assert not call.write(b"headers are sent first")
        await call.send(b"first")
        while call.write(b"y" * 1_000):
            written += 1
        assert call._ended is None

    server.methods = {METHOD: RpcMethod(stream, public=True)}
    peer.data_received(http2_frame(http2.HEADERS, 4, 1, head(METHOD)))
    peer.data_received(http2_frame(http2.DATA, 1, 1, framed(b"")))
    await settled()
    assert written == 66, "the window of 65,535 bytes, and one message that waits"
    sent = bytes(transport.written)
    assert sent.count(b"y") + sent.count(b"x") >= 65_000
    assert sent.index(b"first") < sent.index(b"yyy")
    await server.stop(grace=0.1)


async def test_a_slow_reader_is_no_stuck_one(server: GrpcServer) -> None:
    peer, transport = connected(server)
    peer.data_received(calls(400))
    now = peer._opened
    while transport.waiting > 5_000:
        transport.read(5_000)
        now += 50.0
        peer.sweep(now)
        await asyncio.sleep(0)
    assert not peer.connection.failed


@pytest.mark.parametrize("windows", ["its own", "the connection's"])
async def test_an_answer_that_a_closed_window_holds_back_is_not_kept(service: Service, windows: str) -> None:
    """The client reads all that the socket brings, and answers PINGs: its windows alone stay closed."""
    server = service.server(bind("127.0.0.1", 0), OPTIONS)
    peer, transport = connected(server)

    async def large(call: GrpcCall) -> None:
        await call.send(b"x" * 1_000_000)

    server.methods = {METHOD: RpcMethod(large)}
    more = http2_frame(http2.WINDOW_UPDATE, 0, 1 if windows != "its own" else 0, (1 << 20).to_bytes(4, "big"))
    peer.data_received(opened(1, METHOD, GOOD) + data(1, framed(b""), end=True) + more)
    await settled()
    assert peer.connection.owed > 900_000
    for second in range(62):
        transport.read()
        peer.data_received(http2_frame(http2.PING, 0, 0, b"12345678"))
        peer.sweep(peer._opened + second)
    await settled()
    (call,) = service.done
    assert isinstance(call.error, ClientGone)
    transport.read()
    assert peer.connection.owed < 1_000
    assert bool(peer.connection.failed) == (windows != "its own")
    await server.stop(grace=0.1)


async def test_a_goodbye_that_nobody_reads_is_not_kept(server: GrpcServer) -> None:
    peer, transport = connected(server)
    peer.data_received(http2_frame(http2.HEADERS, 4, 2, b""))
    assert transport.closing
    assert goodbye_in(transport) == http2.PROTOCOL_ERROR
    peer.sweep(peer._opened)
    assert not transport.aborted
    peer.sweep(peer._opened + 10)
    assert transport.aborted


def goodbye_in(transport: Transport) -> int:
    class Said:
        def take(self) -> bytes:
            return bytes(transport.written)

    return goodbye(cast(Any, Said()))


async def test_a_real_client_that_does_not_read(server: GrpcServer) -> None:
    """The kernel's buffers fill, then ours up to its bound; then nothing more is read, and others are served."""
    async with connect(server) as (reader, writer):
        cast(Any, reader)._limit = 1
        writer.write(GREETING)
        peer = await the_peer(server)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                writer.write(calls(10, first=sent) + http2_frame(http2.PING, 0, 0, b"12345678") * 5_000)
                sent += 10
                await writer.drain()

        flooding = asyncio.create_task(flood())
        while not (peer.paused and not peer._reading):
            peer.connection.relax()  # as if seconds passed
            await asyncio.sleep(0)
        assert peer._transport.get_write_buffer_size() < 4 * 65_536
        async with connect(server) as (other, writing):
            writing.write(GREETING + calls(1, PUBLIC))
            await until_said(other, b"grpc-status")
        peer.sweep(peer._moved + 1000)
        peer.sweep(peer._moved + 2000)
        await gone(server, peer)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


# --- what messages hold ---------------------------------------------------------------------------


def opened(number: int, path: str, *more: tuple[bytes, bytes]) -> bytes:
    return http2_frame(http2.HEADERS, 4, number, head(path, *more))


def data(number: int, payload: bytes, *, end: bool = False) -> bytes:
    return http2_frame(http2.DATA, int(end), number, payload)


GOOD = (b"authorization", b"good")


async def test_a_public_method_takes_small_messages(server: GrpcServer) -> None:
    peer, transport = connected(server)
    peer.data_received(opened(1, PUBLIC) + data(1, b"\0" + (4097).to_bytes(4, "big")))
    await settled()
    assert b"limit grpc_public_message: 4,096 bytes" in transport.written
    assert not peer.connection.streams


async def test_calls_without_a_key_hold_little(server: GrpcServer) -> None:
    peer, transport = connected(server)
    partial = framed(b"x" * 4096)[:-1]
    for number in range(1, 401, 2):
        peer.data_received(opened(number, PUBLIC) + data(number, partial))
        transport.read()
    assert len(peer.connection.streams) == 16
    assert peer._held == 16 * len(partial)
    assert b"limit grpc_public_calls: 16 entries" in transport.written
    peer.data_received(b"".join(data(number, b"x", end=True) for number in range(1, 32, 2)))
    await settled()
    assert (peer._held, len(peer.connection.streams)) == (0, 0)


async def test_a_second_message_of_a_unary_call_is_refused_at_once(server: GrpcServer, service: Service) -> None:
    for rest in (framed(b""), b"\0"):
        peer, transport = connected(server)
        peer.data_received(opened(1, METHOD, GOOD) + data(1, framed(b"xy")))
        assert peer.connection.streams
        peer.data_received(data(1, rest))
        await settled()
        assert not peer.connection.streams
        assert b"takes exactly one" in transport.written
        assert (peer._held, service.begun) == (0, [])


async def test_tiny_messages_whose_frames_end_in_the_next_get_no_new_window(server: GrpcServer) -> None:
    peer, _ = connected(server)

    async def deaf(call: GrpcCall) -> None:
        await asyncio.Event().wait()

    server.methods = {SESSION: RpcMethod(deaf, streamed=True)}
    peer.data_received(opened(1, SESSION, GOOD) + data(1, b"\0"))
    for _ in range(200):
        peer.data_received(data(1, b"\0\0\0\2xy\0" * 200))
    assert not peer.connection.streams, "it sends more than its window"
    assert peer._held == 0


async def test_an_empty_message_that_waits_is_held_for_what_it_takes(service: Service) -> None:
    options = OPTIONS._replace(message_limit=10_000, untaken=10_000)
    server = service.server(bind("127.0.0.1", 0), options)
    peer, transport = connected(server)

    async def deaf(call: GrpcCall) -> None:
        await asyncio.Event().wait()

    server.methods = {SESSION: RpcMethod(deaf, streamed=True)}
    peer.data_received(opened(1, SESSION, GOOD) + data(1, framed(b"") * 100))
    assert peer._held == 100 * MESSAGE_BYTES
    peer.data_received(data(1, framed(b"") * 100))
    await settled()
    assert b"limit grpc_untaken: 10,000 bytes" in transport.written
    assert peer._held == 0
    await server.stop(grace=0.1)


async def test_a_flood_of_empty_messages_ends_the_connection(server: GrpcServer, service: Service) -> None:
    peer, transport = connected(server)
    peer.data_received(opened(1, SESSION, GOOD))
    for _ in range(10):
        await settled()
        if not peer.connection.failed:
            peer.data_received(data(1, framed(b"") * 1_000))
    assert "limit grpc_work: 100,000 frames" in peer.connection.failed
    assert goodbye_in(transport) == http2.ENHANCE_YOUR_CALM


async def test_others_have_their_turns_between_two_messages_of_one_read(server: GrpcServer, service: Service) -> None:
    peer, _ = connected(server)
    peer.data_received(opened(1, SESSION, GOOD) + data(1, framed(b"") * 100))
    await settled()
    assert 0 < len(service.begun[0]._messages) < 100


async def test_messages_that_inflate_are_refused_before_all_of_a_read_have(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = service.server(bind("127.0.0.1", 0), OPTIONS._replace(untaken=3 << 20))
    peer, transport = connected(server)
    inflated = []

    def whole(reader: MessageReader, flag: int, data: bytes) -> bytes:
        inflated.append(data)
        return gzip.decompress(data)

    monkeypatch.setattr(MessageReader, "_whole", whole)
    message = framed(gzip.compress(bytes(1 << 20)))
    peer.data_received(opened(1, SESSION, GOOD, (b"grpc-encoding", b"gzip")) + data(1, (b"\1" + message[1:]) * 15))
    await settled()
    assert b"limit grpc_untaken" in transport.written
    assert len(inflated) == 3
    await server.stop(grace=0.1)


async def test_many_calls_with_long_metadata_that_are_let_in_are_no_attack(server: GrpcServer) -> None:
    """All of them at once, before any message is complete."""
    peer, transport = connected(server)
    for number in range(1, 2001, 2):
        peer.data_received(opened(number, METHOD, GOOD, (b"x-token", b"y" * 6_000)))
        transport.read()
    assert (len(peer.connection.streams), peer.connection.failed) == (1_000, "")


async def test_a_large_message_behind_small_ones_comes_whole(server: GrpcServer, service: Service) -> None:
    peer, _ = connected(server)
    large = framed(b"x" * 200_000)
    peer.data_received(opened(1, SESSION, GOOD) + data(1, framed(b"") * 3 + large[:10_000]))
    for at in range(10_000, len(large), 10_000):
        await settled()
        peer.data_received(data(1, large[at : at + 10_000]))
    await settled()
    assert peer.connection.streams
    assert (peer._held, service.begun[0].complete) == (0, False)


async def test_unfinished_messages_of_all_calls_are_bounded(service: Service) -> None:
    server = service.server(bind("127.0.0.1", 0), OPTIONS._replace(message_limit=40_000, untaken=160_000))
    peer, transport = connected(server)
    part = framed(b"x" * 40_000)[:16_000]
    for number in range(1, 41, 2):
        peer.data_received(opened(number, METHOD, GOOD) + data(number, part) + data(number, part))
        transport.read()
    assert peer._held <= 160_000
    assert len(peer.connection.streams) == 5
    assert b"limit grpc_untaken: 160,000 bytes, fixed" in transport.written
    await server.stop(grace=0.1)


async def test_a_call_with_too_much_metadata_is_refused_and_others_go_on(server: GrpcServer) -> None:
    peer, transport = connected(server)
    more = [(b"x-%d" % number, b"y" * 100) for number in range(150)]
    block = head(METHOD, GOOD, *more)
    peer.data_received(http2_frame(http2.HEADERS, 1, 1, block[:16_000]))
    peer.data_received(http2_frame(http2.CONTINUATION, 4, 1, block[16_000:]))
    await settled()
    assert b"limit grpc_metadata: 16,384 bytes" in transport.written
    transport.written.clear()
    peer.data_received(opened(3, METHOD, GOOD) + data(3, framed(b""), end=True))
    await settled()
    assert b"x" * 100 in transport.written
    assert not peer.connection.failed


async def test_a_connection_without_a_key_is_sent_away_and_one_with_a_key_stays(server: GrpcServer) -> None:
    strangers = [connected(server, GREETING + said) for said in (b"", opened(1, PUBLIC), calls(1))]
    friend, kept = connected(server, GREETING + opened(1, METHOD, GOOD) + data(1, framed(b""), end=True))
    await settled()
    for seconds in (61, 65, 85):
        for peer, transport in [*strangers, (friend, kept)]:
            transport.read()
            peer._heard = peer._opened + seconds
            peer.sweep(peer._opened + seconds)
    for _, transport in strangers:
        assert transport.closing
        assert goodbye_in(transport) == http2.NO_ERROR
    assert not kept.closing


@contextlib.asynccontextmanager
async def connect(
    server: GrpcServer, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = server.address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, **options)
    try:
        yield reader, writer
    finally:
        cast(Any, writer.transport).abort()


async def the_peer(server: GrpcServer) -> GrpcConnection:
    await until(lambda: bool(server.peers))
    return next(iter(server.peers))


async def gone(server: GrpcServer, peer: GrpcConnection) -> None:
    await until(lambda: peer not in server.peers)


async def until_said(reader: asyncio.StreamReader, wanted: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(20):
        while wanted not in data:
            part = await reader.read(65_536)
            assert part, data
            data += part
    return data

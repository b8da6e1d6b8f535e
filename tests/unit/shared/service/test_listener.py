"""Connections before they are made: counted, timed, and turned away."""

import asyncio
import contextlib
import errno
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trustme
from structlog.testing import capture_logs

from shared.errors import ConfigurationError, PortInUse
from shared.service import listener as listener_module
from shared.service.listener import ConnectionAdmission, Listener, bind, reserve


class Seen(asyncio.Protocol):
    """Writes down what becomes of connections."""

    def __init__(self) -> None:
        self.began: list[object] = []
        self.failed: list[object] = []
        self.made: list[object] = []
        self.room = 2
        self.news = asyncio.Event()

    def admission(self, seconds: float | None = None) -> ConnectionAdmission:
        return ConnectionAdmission(seconds, lambda: len(self.began) < self.room, self.began.append, self.note_failed)

    def note_failed(self, protocol: object) -> None:
        self.failed.append(protocol)
        self.news.set()

    async def until_made(self, count: int) -> None:
        while len(self.made) < count:
            self.news.clear()
            await self.news.wait()

    def make(self) -> asyncio.BaseProtocol:
        seen = self

        class Made(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                seen.made.append(self)
                seen.news.set()

        return Made()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def listening(seen: Seen, tls: ssl.SSLContext | None, seconds: float | None = None) -> AsyncIterator[int]:
    sock = bind("127.0.0.1", 0)
    listener = Listener(sock, seen.make, tls, seen.admission(seconds))
    listener.start()
    yield sock.getsockname()[1]
    listener.close()
    await listener.wait_closed()
    assert not listener.opening


async def test_a_handshake_that_never_comes_is_known_and_ends(tls: ssl.SSLContext) -> None:
    seen = Seen()
    async with listening(seen, tls, 0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(20):
            assert await reader.read() == b"", "the server has ended it"
            await seen.news.wait()
        assert (len(seen.began), seen.failed, seen.made) == (1, seen.began, [])
        await closed(writer)


async def test_a_handshake_makes_a_connection(authority: trustme.CA, tls: ssl.SSLContext) -> None:
    seen, context = Seen(), ssl.create_default_context()
    authority.configure_trust(context)
    async with listening(seen, tls, 20.0) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        async with asyncio.timeout(20):
            await seen.news.wait()
        assert (seen.made, seen.failed) == (seen.began, [])
        await closed(writer)


async def test_one_too_many_is_closed_at_once(tls: ssl.SSLContext) -> None:
    seen = Seen()
    async with listening(seen, tls, 600.0) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await silent[2][0].read() == b""
        assert len(seen.began) == 2
    assert set(seen.failed) == set(seen.began), "their handshakes end with the server"
    for _, writer in silent:
        await closed(writer)


@pytest.mark.parametrize(
    ("host", "message"),
    [("nowhere.invalid", "cannot be resolved .*--host"), ("192.0.2.1", r"Cannot listen on 192\.0\.2\.1:0")],
)
def test_an_address_that_is_none_of_this_machine_is_named(host: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bind(host, 0)


class Exhausted:
    """A socket on which nothing can be accepted at first."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.faults = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.faults:
            self.faults -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


async def test_without_descriptors_it_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PAUSE", 0.01)
    seen, sock = Seen(), bind("127.0.0.1", 0)
    listener = Listener(Exhausted(sock), seen.make, None, seen.admission())  # type: ignore[arg-type]
    listener.start()
    with capture_logs() as logs:
        _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        await asyncio.wait_for(seen.news.wait(), 30)
    assert seen.made
    assert [line["event"] for line in logs] == ["accept_failed"]
    listener.close()
    await closed(writer)


# --- a port that several share -------------------------------------------------------------------


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


async def test_connections_are_divided_among_those_that_share_a_port() -> None:
    ones = [Seen(), Seen()]
    first = bind("127.0.0.1", 0, shared=True)
    socks = [first, bind("127.0.0.1", port_of(first), shared=True)]
    listeners = [Listener(sock, seen.make, None, ConnectionAdmission()) for sock, seen in zip(socks, ones, strict=True)]
    listeners[0].start()
    writers = [(await asyncio.open_connection("127.0.0.1", port_of(first)))[1] for _ in range(8)]
    listeners[1].start()
    async with asyncio.timeout(30):
        while not ones[1].made:
            writers.append((await asyncio.open_connection("127.0.0.1", port_of(first)))[1])
            await asyncio.sleep(0)
        await ones[1].until_made(1)
        await ones[0].until_made(8)
    for listener in listeners:
        listener.close()
    for writer in writers:
        await closed(writer)


async def test_what_waits_to_be_accepted_is_not_lost_when_a_listener_closes() -> None:
    seen, sock = Seen(), bind("127.0.0.1", 0, shared=True)
    listener = Listener(sock, seen.make, None, ConnectionAdmission())
    listener.start()
    waiting = [socket.create_connection(("127.0.0.1", port_of(sock))) for _ in range(100)]
    listener.close()
    async with asyncio.timeout(30):
        await seen.until_made(len(waiting))
    for client in waiting:
        client.close()


def test_a_reserved_port_is_nobody_elses() -> None:
    with reserve("127.0.0.1", 0, shared=True) as kept:
        port = port_of(kept)
        with pytest.raises(PortInUse, match=r"by another program; .* --port"):
            bind("127.0.0.1", port)
        with pytest.raises(PortInUse):
            reserve("127.0.0.1", port, shared=True)
        with bind("127.0.0.1", port, shared=True), bind("127.0.0.1", port, shared=True):
            pass
    with reserve("127.0.0.1", port) as kept, bind("127.0.0.1", port):
        assert port_of(kept) == port, "one may listen there"
        with pytest.raises(PortInUse):
            bind("127.0.0.1", port)


def test_a_port_of_a_program_that_does_not_share_it_is_taken() -> None:
    with (
        bind("127.0.0.1", 0) as taken,
        pytest.raises(PortInUse, match=r"a program that does not share it, or another user's; .* --grpc-port"),
    ):
        bind("127.0.0.1", port_of(taken), option="--grpc-port", shared=True)


def test_a_system_that_divides_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match=r"Port 8000 cannot be shared: .*; run one gateway"):
        bind("127.0.0.1", 8000, shared=True)

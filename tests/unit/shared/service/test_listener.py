"""Connections before they are made: counted, timed, and turned away."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trustme
from structlog.testing import capture_logs

from shared.errors import ConfigurationError
from shared.service import listener as listener_module
from shared.service.listener import Admission, Listener, bind


class Seen(asyncio.Protocol):
    """Writes down what becomes of connections."""

    def __init__(self) -> None:
        self.began: list[object] = []
        self.failed: list[object] = []
        self.made: list[object] = []
        self.room = 2
        self.news = asyncio.Event()

    def admission(self, seconds: float | None = None) -> Admission:
        return Admission(seconds, lambda: len(self.began) < self.room, self.began.append, self.note_failed)

    def note_failed(self, protocol: object) -> None:
        self.failed.append(protocol)
        self.news.set()

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
async def listening(
    seen: Seen, tls: ssl.SSLContext | None, seconds: float | None = None
) -> AsyncIterator[int]:
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

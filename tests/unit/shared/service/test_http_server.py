"""How a service's HTTP server ends: at once where nobody is connected, with its answers where somebody is."""

import asyncio
from typing import Any

import pytest

from shared.service import http_server
from shared.service.http_server import HttpServer
from shared.service.listener import bind

HOURS = 3600.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return await reader.readexactly(2)


async def started() -> HttpServer:
    server = HttpServer(app, bind("127.0.0.1", 0))
    await server.start()
    return server


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_without_connections_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SETTLE", HOURS)
    server = await started()
    reader, writer = await connect(server)
    assert await ask(reader, writer) == b"ok"
    writer.close()
    await writer.wait_closed()
    while server._server.server_state.connections:  # noqa: ASYNC110  # uvicorn tells nobody
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await server.stop_accepting()
        await server.stop()
    with pytest.raises(OSError, match="Connect call failed"):
        await connect(server)


async def test_a_connection_is_still_read_from_and_its_answer_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SETTLE", HOURS)
    server = await started()
    reader, writer = await connect(server)
    assert await ask(reader, writer) == b"ok"
    stopping = asyncio.create_task(server.stop_accepting())
    while server._server.listeners[0]._serving:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await ask(reader, writer) == b"ok", "it could not know"
    assert not stopping.done()
    stopping.cancel()
    await server.stop()
    assert await reader.read() == b"", "the connection has been closed"
    writer.close()

"""Applications behind connections without HTTP's bytes, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.core.asgi import CONNECTION
from tests.simulation.core.asgi import AsgiServer, Exchange, Lost

GET = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"a", b"b")]}
SOCKET = {"type": "websocket", "path": "/", "query_string": b"", "headers": []}


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[AsgiServer]:
    server = AsgiServer(app, "127.0.0.1", 0)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_an_answer_comes_in_its_events() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": scope["headers"]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with served(app) as server:
        asked = {"type": "http.request", "body": b"hello", "more_body": False}
        async with Exchange(server.address, GET, asked) as exchange:
            events = [await exchange.receive() for _ in range(3)]
            with pytest.raises(Lost):
                await exchange.receive()
    assert events[0]["headers"] == [[b"a", b"b"]]
    assert [event.get("body") for event in events] == [None, b"hello", b""]
    assert server.connections == {}


async def test_the_application_hears_that_its_client_has_gone() -> None:
    heard = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        heard.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})  # to nobody

    async with served(app) as server:
        async with Exchange(server.address, GET):
            pass
        async with asyncio.timeout(5):
            await heard.wait()


async def test_parts_are_written_at_once_while_there_is_room_and_the_clients_going_is_told() -> None:
    wrote: list[bool] = []
    full, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection = scope["extensions"][CONNECTION]
        wrote.append(connection.write(b"before the answer has begun"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection.watch(gone.set)
        while not wrote[1:] or wrote[-1]:
            wrote.append(connection.write(connection.body() or b"x" * 1_000_000))
        full.set()
        await gone.wait()
        wrote.append(connection.write(b"to nobody"))

    async with served(app) as server:
        asked = {"type": "http.request", "body": b"hello", "more_body": False}
        async with Exchange(server.address, GET, asked) as exchange:
            assert (await exchange.receive())["status"] == 200
            first = await exchange.receive()
            exchange.hold()
            await full.wait()
    assert first["more_body"]
    assert wrote[0] is False
    assert wrote[1] is True
    assert wrote[-2:] == [False, False]


async def test_a_client_that_does_not_read_holds_its_application_up() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await receive()
        for _ in range(400):
            await send({"type": "websocket.send", "bytes": b"x" * 100_000})
            sent += 1

    async with served(app) as server, Exchange(server.address, SOCKET, {"type": "websocket.connect"}) as slow:
        await slow.receive()
        slow.hold()
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 400
        slow.go_on()
        for _ in range(399):
            await slow.receive()
    assert sent == 400


async def test_a_server_that_stops_closes_sockets_and_lets_answers_end() -> None:
    closed = []
    go_on, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.release()
        if scope["type"] == "websocket":
            await receive()
            closed.append((await receive())["code"])
            return
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"end"})

    server = AsgiServer(app, "127.0.0.1", 0)
    await server.start()
    async with (
        Exchange(server.address, GET) as whole,
        Exchange(server.address, SOCKET, {"type": "websocket.connect"}) as socket,
        Exchange(server.address, GET),
    ):
        for _ in range(3):
            await begun.acquire()
        await server.stop_accepting()
        with pytest.raises(Lost):
            async with Exchange(server.address, GET):
                pass
        stopping = asyncio.create_task(server.stop())
        with pytest.raises(Lost):
            await socket.receive()
        go_on.set()
        await whole.receive()
        assert (await whole.receive())["body"] == b"end"
        await stopping
    assert closed == [1012]

"""The ASGI extensions of streams, which write and hear of a client that goes without a task, over real sockets."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import httpx
import pytest
from websockets.asyncio.client import connect

from services.gateway.core.asgi import UntilGone, connection_of, message_writer, read_body
from services.gateway.server.connections import ConnectionLimiter, ConnectionLimits
from services.gateway.server.http1 import guarded_http
from services.gateway.server.websocket import GuardedWebSocket
from shared.service.endpoints import Receive, Scope, Send
from shared.service.http_server import HttpServer
from shared.service.listener import bind

PART = 4096 * b"x"
BEGIN = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"end"}

Write = Callable[[bytes], bool]
Answer = Callable[[Write, Receive, Send], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def ask(answer: Answer, client: Callable[[str], Awaitable[None]]) -> None:
    """Serves `answer` at an address that `client` is given."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        await answer(connection.write, receive, send)

    await serve(app, client)


async def serve(inner: App, client: Callable[[str], Awaitable[None]]) -> None:
    """As `ask`, an application. Raises what it raises."""
    errors: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await inner(scope, receive, send)
        except BaseException as error:
            errors.append(error)
            raise

    door = ConnectionLimiter(8)
    options = {
        "http": guarded_http(ConnectionLimits(10.0, 1 << 16), door),
        "admission": door.admission("http"),
        "ws": GuardedWebSocket,
        "ws_per_message_deflate": False,
    }
    server = HttpServer(app, bind("127.0.0.1", 0), **options)
    await server.start()
    try:
        await asyncio.wait_for(client(server.address), 20)
    finally:
        await server.stop()
    assert not errors


def leaving(request: bytes, begun: asyncio.Event, heard: asyncio.Event) -> Callable[[str], Awaitable[None]]:
    """A client that leaves once its request has begun, and waits until that was heard of."""

    async def client(address: str) -> None:
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(request)
        await begun.wait()
        writer.close()
        await heard.wait()

    return client


async def test_parts_come_in_their_order() -> None:
    async def answer(write: Write, receive: Receive, send: Send) -> None:
        assert not write(b"too early"), "there is no head yet"
        await send(BEGIN)
        assert write(b"a ")
        assert write(b"b ")
        await send({"type": "http.response.body", "body": b"c ", "more_body": True})
        assert write(b"d ")
        await send(END)
        assert not write(b"too late")

    async def client(address: str) -> None:
        async with httpx.AsyncClient() as session:
            for _ in range(2):  # on one connection
                assert (await session.get(f"http://{address}/")).text == "a b c d end"

    await ask(answer, client)


async def test_an_answer_of_known_length_or_without_a_body_is_not_written_to() -> None:
    async def answer(write: Write, receive: Receive, send: Send) -> None:
        await send({**BEGIN, "headers": [(b"content-length", b"3")]})
        assert not write(b"abc")
        await send(END)

    async def headless(write: Write, receive: Receive, send: Send) -> None:
        await send(BEGIN)
        assert not write(b"abc")
        await send(END)

    async def get(address: str) -> None:
        async with httpx.AsyncClient() as session:
            assert (await session.get(f"http://{address}/")).text == "end"

    async def head(address: str) -> None:
        async with httpx.AsyncClient() as session:
            assert (await session.head(f"http://{address}/")).text == ""

    await ask(answer, get)
    await ask(headless, head)


async def test_a_client_that_does_not_read_is_written_a_bounded_part() -> None:
    full, read = asyncio.Event(), 0

    async def answer(write: Write, receive: Receive, send: Send) -> None:
        nonlocal read
        await send(BEGIN)
        parts = 0
        for _ in range(20_000):
            if not write(PART):
                break
            parts += 1
            await asyncio.sleep(0)
        assert 0 < parts < 20_000
        full.set()
        await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits
        assert write(b"again ")
        await send(END)
        read = parts

    async def client(address: str) -> None:
        reader, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        await full.wait()
        data = await reader.read()
        assert data.endswith(b"again \r\n3\r\nend\r\n0\r\n\r\n")
        assert data.count(PART) == read
        writer.close()

    await ask(answer, client)


async def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def answer(write: Write, receive: Receive, send: Send) -> None:
        await send(BEGIN)
        assert write(b"a")
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        assert not write(b"b")
        gone.set()

    await ask(answer, leaving(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", begun, gone))


async def test_messages_of_a_websocket_come_in_their_order() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write = message_writer(scope)
        assert write is not None
        assert not write([b"too early"]), "it is not accepted yet"
        await accept(receive, send)
        assert write([b"a", b"b"])
        await send({"type": "websocket.send", "text": "c"})
        assert write([b"d"])
        await send({"type": "websocket.close"})
        assert not write([b"too late"])

    async def client(address: str) -> None:
        async with connect(f"ws://{address}/") as socket:
            assert [message async for message in socket] == ["a", "b", "c", "d"]

    await serve(app, client)


async def accept(receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})


async def test_a_websocket_that_is_not_read_is_written_a_bounded_part() -> None:
    full = asyncio.Event()
    written = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        write = message_writer(scope)
        assert write is not None
        await accept(receive, send)
        while write([PART, PART]):
            written += 2
            assert written < 20_000
            await asyncio.sleep(0)
        full.set()
        await send({"type": "websocket.send", "text": "waits"})
        assert write([b"again"])
        await send({"type": "websocket.close"})

    async def client(address: str) -> None:
        async with connect(f"ws://{address}/", max_queue=1) as socket:
            await full.wait()
            messages = [message async for message in socket]
        assert messages == [PART.decode()] * written + ["waits", "again"]

    await serve(app, client)


async def test_nothing_is_written_to_a_websocket_whose_client_has_gone() -> None:
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write = message_writer(scope)
        assert write is not None
        await accept(receive, send)
        assert (await receive())["type"] == "websocket.disconnect"
        assert not write([b"a"])
        gone.set()

    async def client(address: str) -> None:
        async with connect(f"ws://{address}/"):
            pass
        await gone.wait()

    await serve(app, client)


@pytest.mark.parametrize("length", [0, 200_000], ids=["no body", "a body that pauses reading"])
async def test_a_request_hears_that_its_client_goes(length: int) -> None:
    waiting, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert len(await read_body(scope, receive, 1 << 20, 10.0)) == length
        tasks = len(asyncio.all_tasks())
        with UntilGone(scope, receive, gone.set):
            assert len(asyncio.all_tasks()) == tasks
            waiting.set()
            await gone.wait()

    async def client(address: str) -> None:
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % length)
        writer.write(length * b"x")
        await waiting.wait()
        assert not gone.is_set()
        writer.close()
        await gone.wait()

    await serve(app, client)


async def test_a_request_that_is_answered_leaves_nothing_to_the_garbage_collector() -> None:
    cycles: list[weakref.ref[object]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert connection_of(scope) is not None
        cycles.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined]
        await send(BEGIN)
        await send(END)

    async def client(address: str) -> None:
        async with httpx.AsyncClient() as session:
            for _ in range(3):  # on one connection, which has the last one
                await session.get(f"http://{address}/")
        assert [cycle() is None for cycle in cycles[:2]] == [True, True]

    gc.disable()
    try:
        await serve(app, client)
    finally:
        gc.enable()


async def test_a_body_that_has_come_whole_is_taken_and_the_client_still_heard_of() -> None:
    taken, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        assert connection.body() == b"whole"
        taken.set()
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    await serve(app, leaving(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nwhole", taken, gone))


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["in parts", "once it is asked for"])
async def test_a_body_that_is_still_to_come_is_received(expect: bytes) -> None:
    begun, read = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        assert connection.body() is None
        begun.set()
        assert await read_body(scope, receive, 100, 10.0) == b"in parts"
        read.set()
        await send(BEGIN)
        await send(END)

    async def client(address: str) -> None:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        first = b"" if expect else b"in "
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 8\r\n%b\r\n%b" % (expect, first))
        await begun.wait()
        if expect:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"in parts"[len(first) :])
        await read.wait()
        writer.close()

    await serve(app, client)


async def test_a_request_hears_of_a_client_that_has_gone_before() -> None:
    begun, heard = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        with UntilGone(scope, receive, heard.set):
            assert heard.is_set()

    await serve(app, leaving(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", begun, heard))


async def test_who_is_answered_hears_nothing_of_the_request_behind_it() -> None:
    heard: list[int] = []
    waiting, over = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        number = int(scope["path"][1:])
        with UntilGone(scope, receive, lambda: heard.append(number)):
            if number == 2:
                waiting.set()
                while (await receive())["type"] != "http.disconnect":
                    pass
                over.set()
                return
        await send(BEGIN)
        await send(END)

    async def client(address: str) -> None:
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n" % number for number in (1, 2)))
        await waiting.wait()
        writer.close()
        await over.wait()

    await serve(app, client)
    assert heard == [2]

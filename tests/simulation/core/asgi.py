"""ASGI applications behind the world's connections: HTTP and WebSocket without their bytes.

ASGI's own events cross the connection, each as one frame. So an application is asked as by uvicorn, and delays, cuts,
resets and readers that are slow are the network's.

    Exchange ──scope, http.request, websocket.receive──▶ AsgiServer ──▶ app(scope, receive, send)
             ◀──http.response.*, websocket.send─────────

It offers what the gateway's own server offers beside ASGI (`services/gateway/core/asgi.py`): bodies that have come
are taken, and streams are written, by callbacks.

It works on any event loop: tests drive real gateways with it over real sockets.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from services.gateway.core.asgi import CONNECTION, WEBSOCKET

App = Callable[[Any, Any, Any], Awaitable[None]]
Event = dict[str, Any]
# Seconds for which requests are still read from connections without one, once there are no new connections.
SETTLE = 0.1
Write = Callable[[Event], bool]
# Who serves scopes of further types than HTTP and WebSocket, in the terms of a WebSocket, beside an application: from
# scope, receive, send, and what sends an event at once (False: it would wait).
MORE: dict[str, Callable[[App, Any, Any, Any, Write], Awaitable[None]]] = {}
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class _Frames(asyncio.Protocol):
    """Events in and out; one connection's end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.lost = False
        self.arrived: deque[Event] = deque()
        self.news = asyncio.Event()  # set by what has arrived, and by the end of the connection
        self._buffer = b""
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4])
            if len(self._buffer) < end:
                return
            event, self._buffer = _decode(self._buffer[4:end]), self._buffer[end:]
            self.take(event)

    def take(self, event: Event) -> None:
        self.arrived.append(event)
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.news.set()
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def write(self, event: Event) -> None:
        """Returns once the other side has room. What is written to a lost connection is lost."""
        if self.lost:
            return
        self._put(event)
        await self._room.wait()

    def write_now(self, *events: Event) -> bool:
        """`write` of each, where that would not wait; False: it would, or the connection is lost, and nothing is
        written."""
        if self.lost or not self._room.is_set():
            return False
        for event in events:
            self._put(event)
        return True

    def _put(self, event: Event) -> None:
        data = _encode(event)
        self.transport.write(len(data).to_bytes(4) + data)


class _Served(_Frames):
    """A connection as the server sees it: it brings one request."""

    def __init__(self, server: "AsgiServer") -> None:
        super().__init__()
        self._server = server
        self.websocket = False
        self.task: asyncio.Task[None] | None = None
        self.begun = self.answered = False
        self.gone: Callable[[], None] | None = None
        self.closing = 0  # the code with which a WebSocket is closed from this side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.task is None or self.task.done():
            self._server.connections.pop(self, None)
        if self.gone is not None:
            self.gone()

    def take(self, event: Event) -> None:
        if self.task is not None:
            super().take(event)
            return
        self.websocket = event["type"] != "http"
        self.task = asyncio.get_running_loop().create_task(self._answer(_scope(event)))

    async def _answer(self, scope: Event) -> None:
        app = self._server.app
        try:
            if scope["type"] in MORE:
                await MORE[scope["type"]](app, scope, self._receive, self._send, self.write_now)
            else:
                scope["extensions"] |= (
                    {WEBSOCKET: self._write_texts} if self.websocket else {CONNECTION: _Connection(self)}
                )
                await app(scope, self._receive, self._send)
        finally:
            self._server.connections.pop(self, None)
            self.transport.close()

    async def _receive(self) -> Event:
        while not self.arrived:
            if self.lost or self.answered or self.closing:
                if self.websocket:
                    return {"type": "websocket.disconnect", "code": self.closing or 1006}
                return {"type": "http.disconnect"}
            self.news.clear()
            await self.news.wait()
        return self.arrived.popleft()

    async def _send(self, event: Any) -> None:
        self.begun = True
        if event["type"] == "http.response.body" and not event.get("more_body", False):
            self.answered = True
            self.news.set()
        await self.write(dict(event))

    def _write_texts(self, messages: Sequence[bytes]) -> bool:
        """The extension `WEBSOCKET`."""
        if self.closing:
            return False
        return self.write_now(*({"type": "websocket.send", "text": text.decode()} for text in messages))

    def close(self, code: int = 1012) -> None:
        """The server goes: a WebSocket is closed, an answer may end."""
        if self.task is None:
            self.transport.close()
        elif self.websocket:
            self.closing = code
            self.news.set()


class _Connection:
    """The extension `CONNECTION`, of one answer."""

    def __init__(self, served: _Served) -> None:
        self._served = served

    def body(self) -> bytes | None:
        arrived = self._served.arrived
        if not arrived or arrived[0].get("more_body", False):
            return None
        return bytes(arrived.popleft()["body"])

    def write(self, part: bytes) -> bool:
        served = self._served
        event = {"type": "http.response.body", "body": part, "more_body": True}
        return served.begun and not served.answered and served.write_now(event)

    def hold(self, size: int) -> None:
        """Nobody counts the memory of this world."""

    def watch(self, gone: Callable[[], None] | None) -> None:
        self._served.gone = gone
        if gone is not None and self._served.lost:
            gone()


def _scope(event: Event) -> Event:
    """As uvicorn makes it; `headers` are pairs of bytes again."""
    headers = [(name, value) for name, value in event["headers"]]
    shared = {"asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "", "scheme": "http"}
    more = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "state": {}, "extensions": {}}
    if event["type"] == "websocket":
        more |= {"extensions": {"websocket.http.response": {}}, "subprotocols": []}
    path = event["path"]
    return {**shared, **more, **event, "raw_path": path.encode(), "headers": headers}


class AsgiServer:
    """Stands where `shared.service.http_server.HttpServer` does, with its methods."""

    def __init__(self, app: App, host: str, port: int) -> None:
        """`host`: the name of the process's host in the world."""
        self.app = app
        self._host, self._port = host, port
        self.address = f"{host}:{port}"
        self.connections: dict[_Served, None] = {}
        self._server: Any = None

    async def start(self) -> None:
        """Returns once connections are accepted."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Served(self), self._host, self._port)
        if not self._port:
            self._port = self._server.sockets[0].getsockname()[1]
            self.address = f"{self._host}:{self._port}"

    async def stop_accepting(self) -> None:
        """Refuses new connections and closes idle ones; answers and WebSockets under way go on. Twice is safe."""
        if self._server is not None:
            self._server.close()
        if self.connections:
            await asyncio.sleep(SETTLE)
        for connection in [one for one in self.connections if one.task is None]:
            connection.close()

    async def stop(self, *, grace: float = 5.0) -> None:
        """Waits up to `grace` seconds for open answers, then closes; twice is safe."""
        if self._server is not None:
            self._server.close()
        open_ones = list(self.connections)
        for connection in open_ones:
            connection.close()
        tasks = [one.task for one in open_ones if one.task is not None and not one.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        for connection in open_ones:
            connection.transport.abort()


class Lost(Exception):
    """The connection was lost, or never came to be."""


class Exchange:
    """One request, or one WebSocket, on a connection of its own, as its client sees it. An asynchronous context
    manager, which aborts what is left of the connection at its end."""

    def __init__(self, address: str, scope: Event, *events: Event, connect_timeout: float = 5.0) -> None:
        """`scope`: type, method, path, query_string, headers; `events`: what is sent at once."""
        self._address, self._begin, self._timeout = address, (scope, *events), connect_timeout
        self._frames: _Frames | None = None

    async def __aenter__(self) -> "Exchange":
        """Raises `Lost`."""
        host, _, port = self._address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, self._frames = await loop.create_connection(_Frames, host, int(port))
        except (OSError, TimeoutError) as error:
            raise Lost(f"{self._address} cannot be reached: {error!r}") from None
        for event in self._begin:
            await self.send(event)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._frames is not None and not self._frames.lost:
            self._frames.transport.abort()

    @property
    def frames(self) -> _Frames:
        if self._frames is None:
            raise Lost("not connected")
        return self._frames

    def hold(self) -> None:
        """Reads nothing until `go_on`: the connection fills up."""
        self.frames.transport.pause_reading()

    def go_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.frames.transport.resume_reading()

    async def send(self, event: Event) -> None:
        """Raises `Lost`."""
        if self.frames.lost:
            raise Lost("the connection was lost")
        await self.frames.write(event)

    async def receive(self) -> Event:
        """The next event. Raises `Lost` when there will be none."""
        frames = self.frames
        while not frames.arrived:
            if frames.lost:
                raise Lost("the connection was lost within the answer")
            frames.news.clear()
            await frames.news.wait()
        return frames.arrived.popleft()

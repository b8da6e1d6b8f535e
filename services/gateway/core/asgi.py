"""ASGI in small pieces: bodies with a limit, JSON answers, event streams, the client's going."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from services.gateway.core.errors import ClientGone, InvalidParameter, RequestTimeout, RouteError
from shared.errors import PayloadTooLarge
from shared.service.endpoints import Receive, Scope, Send

# Milliseconds after which a client that was cut off should come back: shorter than the grace it has.
RETRY = 500


def request_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """A request's headers by their lower-case names; of those that came several times the first. Made once for each
    request, and dropped by `forget_headers`."""
    state = scope.setdefault("state", {})
    headers: Mapping[bytes, bytes] | None = state.get("headers")
    if headers is None:
        headers = state["headers"] = dict(reversed(scope["headers"]))
    return headers


def forget_headers(scope: Scope) -> None:
    """For a request that waits long, as thousands do."""
    scope["state"].pop("headers", None)


def header(scope: Scope, name: bytes) -> str | None:
    """A request header by its lower-case name."""
    value = request_headers(scope).get(name)
    return None if value is None else value.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float) -> bytes:
    """The whole body. Raises `PayloadTooLarge`, before it is read where its length is told;
    `RequestTimeout` when it is not there within `timeout` seconds; `ClientGone`."""
    headers = request_headers(scope)
    if headers.get(b"content-type") != b"application/json":
        _check_content_type(scope)
    length = headers.get(b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    connection = connection_of(scope)
    body = connection.body() if connection is not None else None
    if body is None:
        body = await _read_in_time(receive, limit, timeout, connection)
    elif len(body) > limit:
        raise _too_large(limit)
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidParameter(
            "Compressed request bodies are not supported; send the body as it is.",
            param="content-encoding",
            reason="unsupported_encoding",
        )
    return body


async def _read_in_time(receive: Receive, limit: int, timeout: float, connection: "Connection | None") -> bytes:
    try:
        async with asyncio.timeout(timeout):
            return await _read_all(receive, limit, connection)
    except TimeoutError:
        raise RequestTimeout(
            f"The request body was not complete after {timeout:g} s; send it again, faster or in smaller parts."
        ) from None
    finally:
        if connection is not None:
            connection.hold(0)


async def _read_all(receive: Receive, limit: int, connection: "Connection | None") -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if connection is not None:
            connection.hold(size)
        if not message.get("more_body", False):
            break
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_content_type(scope: Scope) -> None:
    """A page may send other types than JSON to anywhere without asking first (Fetch, CORS-safelisted headers). None at
    all is taken for JSON: pages are known by their Origin, and old scripts send none. Raises `RouteError`."""
    given = header(scope, b"content-type")
    if given is None:
        return
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RouteError(
            f"The body is JSON; send it with Content-Type: application/json instead of '{given[:64]}'.",
            status=415,
            reason="unsupported_media_type",
            param="content-type",
        )


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than {limit:,} bytes; shorten the request.")


async def disconnected(receive: Receive) -> None:
    """Returns when the client goes. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connection(Protocol):
    """What a server of this gateway offers beside `receive` and `send`, of one request: thousands of streams wait, and
    take neither a task each to hear of their client nor one to write."""

    def body(self) -> bytes | None:
        """The request's body, once, where it has come as a whole, as nearly every one has by the time that it is asked
        for; None: it is to be received."""
        ...

    def write(self, part: bytes) -> bool:
        """Writes a part of a body at once, as `send` would behind those before it; False: it cannot now, and has
        written nothing."""
        ...

    def hold(self, size: int) -> None:
        """So many bytes of the body have been received, and wait for the rest."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """`gone` is called when the client goes, at once if it has gone; None: nothing is called any more."""
        ...


CONNECTION = "ryzanstein.connection"  # name of the ASGI extension that is a `Connection`


def connection_of(scope: Scope) -> Connection | None:
    """None: its server offers none."""
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    return connection


# Name of the ASGI extension of a WebSocket, a function that writes text messages at once, as `send` would behind those
# before them; False: it cannot now, and has written nothing.
WEBSOCKET = "ryzanstein.websocket"
WriteMessages = Callable[[Sequence[bytes]], bool]


def message_writer(scope: Scope) -> WriteMessages | None:
    """None: its server offers none."""
    write: WriteMessages | None = scope.get("extensions", {}).get(WEBSOCKET)
    return write


class UntilGone:
    """Context manager: `gone` is called when the client goes meanwhile. The body has been read."""

    __slots__ = ("_connection", "_gone", "_receive", "_watcher")

    def __init__(self, scope: Scope, receive: Receive, gone: Callable[[], None]) -> None:
        self._connection = connection_of(scope)
        self._receive = receive
        self._gone = gone
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if self._connection is None:
            self._watcher = asyncio.create_task(self._watch())
        else:
            self._connection.watch(self._gone)

    def __exit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._connection is not None:
            self._connection.watch(None)

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self._gone()


async def send_json(
    send: Send,
    status: int,
    body: object,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> None:
    """A whole answer: `body` as JSON, bytes as they are."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = [(b"content-type", content_type.encode()), (b"content-length", str(len(data)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": data})


async def send_parts(
    send: Send, content: AsyncGenerator[bytes, None], content_type: str, size: int | None = None
) -> None:
    """A whole answer, part by part, as fast as the client takes them; `size`: bytes, where that is known."""
    head = [(b"content-type", content_type.encode())]
    if size is not None:
        head.append((b"content-length", str(size).encode()))
    async with contextlib.aclosing(content) as parts:
        first = await anext(parts, b"")  # what is wrong is said before the status is sent
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class StreamChunk(msgspec.Struct, frozen=True, gc=False):
    """A part of a stream: a JSON text, or a part of a protobuf message."""

    data: bytes
    # Where in its log a reader of everything up to this chunk stands: a number per choice, with commas; empty where it
    # is of no log.
    position: bytes = b""
    event: bytes = b""  # the type of the server-sent event, where it has one
    # How much of the prompts is computed, where it tells that: it is not of the log then, and `data` the same as JSON
    # (`streams/progress.py`).
    comment: bytes = b""


class EventStream:
    """Server-sent events (WHATWG HTML, section 9.2). Begins with the first write."""

    _HEAD = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    )

    __slots__ = ("_connection", "_send", "started")

    def __init__(self, send: Send, connection: Connection | None = None) -> None:
        """`connection`: what `write_now` needs."""
        self._send = send
        self._connection = connection
        self.started = False

    async def comment(self) -> None:
        """Keeps the connection from looking idle; no event."""
        await self._send({"type": "http.response.body", "body": b":\n\n", "more_body": True})

    async def write(self, chunks: Sequence[StreamChunk], *, end: bool = False) -> None:
        """An event each, in one write."""
        body = b""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(self._HEAD)})
            body = b"retry: %d\n" % RETRY
        body += self.body(chunks)
        await self._send({"type": "http.response.body", "body": body, "more_body": not end})

    def write_now(self, chunks: Sequence[StreamChunk]) -> bool:
        """As `write`, in no coroutine; False: they cannot be written now, and nothing is."""
        connection, chunk = self._connection, chunks[0]
        if connection is None:
            return False
        if len(chunks) > 1 or not chunk.position or chunk.comment:
            return connection.write(self.body(chunks))
        kind = b"event: %b\n" % chunk.event if chunk.event else b""
        return connection.write(b"%bdata: %b\nid: %b\n\n" % (kind, chunk.data, chunk.position))

    def body(self, chunks: Sequence[StreamChunk]) -> bytes:
        """`chunks` as they are written: the position is the event's id, and of one with a comment that alone is
        written."""
        body = b""
        for chunk in chunks:
            # Without an empty line: clients take one for an event, be it that it has no data.
            if chunk.comment:
                body += b": %b\n" % chunk.comment
                continue
            if chunk.event:
                body += b"event: %b\n" % chunk.event
            if chunk.position:
                body += b"data: %b\nid: %b\n\n" % (chunk.data, chunk.position)
            else:
                body += b"data: %b\n\n" % chunk.data
        return body


class LineStream:
    """JSON texts, a line each (NDJSON). Begins with the first write."""

    _HEAD = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

    __slots__ = ("_connection", "_positions", "_send", "started")

    def __init__(self, send: Send, connection: Connection | None = None, *, positions: bool = False) -> None:
        """`connection`: what `write_now` needs. `positions`: whether each line, an object, has its id as `position`."""
        self._send = send
        self._connection = connection
        self._positions = positions
        self.started = False

    async def write(self, chunks: Sequence[StreamChunk], *, end: bool = False) -> None:
        """As `EventStream.write`; types and comments have no place here."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(self._HEAD)})
        await self._send({"type": "http.response.body", "body": self.body(chunks), "more_body": not end})

    def write_now(self, chunks: Sequence[StreamChunk]) -> bool:
        """As `EventStream.write_now`."""
        return self._connection is not None and self._connection.write(self.body(chunks))

    def body(self, chunks: Sequence[StreamChunk]) -> bytes:
        """As `EventStream.body`."""
        body = b""
        for chunk in chunks:
            if chunk.comment:
                continue
            data = chunk.data
            if self._positions and chunk.position:
                data = data[:-1] + b',"position":"%b"}' % chunk.position
            body += data + b"\n"
        return body

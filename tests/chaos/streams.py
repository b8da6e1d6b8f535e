"""A small HTTP/1.1 client that sees every read: what came, when, and whether the end was the right one."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httptools
import msgspec

CONNECT_TIMEOUT = 5.0


class Lost(Exception):
    """The connection was lost before the answer was complete."""


class Refused(Exception):
    """An error answer. `status` 0: within a stream that had begun."""

    def __init__(self, status: int, body: bytes, retry_after: float = 0.0) -> None:
        super().__init__(f"{status}: {body[:500]!r}")
        self.status = status
        self.retry_after = retry_after
        with_error = _json(body)
        self.code = str((with_error.get("error") or {}).get("code", ""))


class Answer:
    """One request on a connection of its own. Use as an asynchronous context manager."""

    def __init__(
        self,
        address: str,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: dict[str, str] | None = None,
        receive_buffer: int = 0,
    ) -> None:
        """`receive_buffer`: bytes that the kernel and this client hold unread, for clients that are slow."""
        self._address = address
        payload = msgspec.json.encode(body) if body is not None else b""
        head = {"Host": address, "Connection": "close", **(headers or {})}
        if body is not None:
            head |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        self._request = "\r\n".join(lines).encode() + b"\r\n\r\n" + payload
        self._receive_buffer = receive_buffer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._complete = False
        self._writer: asyncio.StreamWriter | None = None
        self._headers: dict[str, str] = {}

    async def __aenter__(self) -> "Answer":
        host, _, port = self._address.rpartition(":")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
                self._reader, self._writer = await asyncio.open_connection(
                    sock=sock, limit=self._receive_buffer or 1 << 16
                )
        except (OSError, TimeoutError) as error:
            sock.close()
            raise Lost(f"{self._address} cannot be reached: {error!r}") from None
        self._writer.write(self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    # httptools' callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete = True

    async def read(self, size: int = 1 << 16) -> bytes:
        """The next bytes of the body; empty at its end. Raises `Lost`."""
        while not self._parts:
            if self._complete:
                return b""
            try:
                data = await self._reader.read(size)
            except OSError as error:
                raise Lost(str(error)) from None
            if not data:
                raise Lost("the connection was closed within the answer")
            self._parser.feed_data(data)
        parts, self._parts = self._parts, []
        return b"".join(parts)

    async def whole(self) -> dict[str, Any]:
        """The JSON answer. Raises `Lost`, `Refused`."""
        parts = []
        while data := await self.read():
            parts.append(data)
        body = b"".join(parts)
        self._check(body)
        return _json(body)

    async def events(self) -> AsyncIterator[tuple[str | None, bytes]]:
        """(id, data) of each event, `[DONE]` included. Raises `Lost`, `Refused`."""
        buffer = b""
        while data := await self.read():
            if self._parser.get_status_code() != 200:
                buffer += data
                continue
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                yield _event(event)
        self._check(buffer)

    def _check(self, body: bytes) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            raise Refused(status, body, float(self._headers.get("retry-after", 0)))


def _event(text: bytes) -> tuple[str | None, bytes]:
    identity: str | None = None
    data = b""
    for line in text.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"id":
            identity = value.decode()
        elif name == b"data":
            data = value
    return identity, data


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

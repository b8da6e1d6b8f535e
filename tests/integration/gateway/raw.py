"""Connections without a client library between, so that anything can be sent."""

import asyncio
import base64
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

from tests.integration.gateway.conftest import RunningGateway

ENDED = 20.0  # seconds within which a connection ends, where it should


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Errors do not matter: the other side may have ended the connection."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything up to the end of the connection; fails when it does not end."""
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ENDED):
                while part := await self.reader.read(65_536):
                    data += part
        return data

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One response with a content-length: status, headers, body."""
        async with asyncio.timeout(ENDED):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def error(self) -> tuple[int, str]:
        """Status and code of an answer in OpenAI's shape, with which the connection ends."""
        status, headers, body = await self.answer()
        assert headers["x-request-id"]
        assert headers["connection"] == "close"
        assert await self.rest() == b""
        error: dict[str, Any] = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"]

    async def upgrade(self, path: str = "/v1/stream", extra: bytes = b"") -> None:
        """Asks for a WebSocket."""
        key = base64.b64encode(os.urandom(16))
        await self.send(
            b"GET %b HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n%b\r\n" % (path.encode(), key, extra)
        )

    async def frame(self, opcode: int, data: bytes = b"", *, fin: bool = True) -> None:
        await self.send(frame(opcode, data, fin=fin))


def frame(opcode: int, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A client's frame (RFC 6455, 5.2), masked with zeros."""
    first = opcode | (0x80 if fin else 0)
    size = len(data)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + bytes(4) + data


@contextlib.asynccontextmanager
async def connect(place: RunningGateway | str) -> AsyncIterator[Raw]:
    address = place if isinstance(place, str) else place.service.address
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()  # type: ignore[attr-defined]

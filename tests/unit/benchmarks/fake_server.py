"""A server of scripted answers on a real socket: it counts words as tokens and can be told to misbehave.

A word is one token, a line break is one, and the words in `long_words` are two. The template puts 10 tokens
around a first message and 7 around each further one.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

FIRST_OVERHEAD = 10
NEXT_OVERHEAD = 7


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": finish}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], "usage": None})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"id": "chatcmpl-1", "choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt_tokens: int


@dataclass
class FakeServer:
    """What to answer, and what was asked. `stream` replaces the events of a good stream; `status` other
    than 200 and `raw` replace the whole answer to a streamed request."""

    models: list[str] = field(default_factory=lambda: ["small", "large"])
    long_words: frozenset[str] = frozenset()
    stream: list[bytes] | None = None
    tokens: int | None = None  # how many tokens to answer with, whatever was asked
    per_event: int = 1
    status: int = 200
    error_body: bytes = b""
    raw: bytes | None = None
    cut: bool = False  # close the connection in the middle of the stream's body
    silent: bool = False  # never answer a streamed request
    lacks: str = ""  # what is asked without a stream below a path with this in it gets 404
    fail_after: int | None = None  # answer this many streamed requests; then 503
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    @property
    def streamed(self) -> list[Request]:
        return [request for request in self.requests if request.body.get("stream")]

    def count(self, messages: list[dict[str, str]]) -> int:
        words = [word for message in messages for word in re.findall(r"\S+|\n", message["content"])]
        template = FIRST_OVERHEAD + NEXT_OVERHEAD * (len(messages) - 1)
        return template + len(words) + sum(word in self.long_words for word in words)

    def events(self, request: Request) -> list[bytes]:
        """The parts of a stream, each written by itself."""
        if self.stream is not None:
            return self.stream
        tokens = self.tokens or request.body["max_tokens"]
        counts = [min(self.per_event, tokens - at) for at in range(0, tokens, self.per_event)]
        return [
            delta("", role="assistant"),
            b": a comment\n\n",
            *(delta(" tok" * count) for count in counts),
            delta(None, "length"),
            usage(request.prompt_tokens, tokens),
            DONE,
        ]


@asynccontextmanager
async def serving(port: int = 0, **behaviour: Any) -> AsyncIterator[FakeServer]:
    """A running fake server; leaving waits until its clients have gone."""
    fake = FakeServer(**behaviour)
    ended: list[asyncio.Future[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        over = asyncio.get_running_loop().create_future()
        ended.append(over)
        try:
            while (request := await _read(fake, reader)) is not None:
                await _answer(fake, request, reader, writer)
        except ConnectionError:
            pass  # the client gave up, as some tests have it
        finally:
            writer.close()
            over.set_result(None)

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield fake
        await asyncio.gather(*ended)


async def _read(fake: FakeServer, reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    start, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    content = await reader.readexactly(int(headers["content-length"]))
    body = json.loads(content) if content else {}
    request = Request(start.split()[1], headers, body, fake.count(body.get("messages", [])))
    fake.requests.append(request)
    return request


async def _answer(
    fake: FakeServer, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if fake.lacks and fake.lacks in request.path:
        writer.write(_plain(404, b"{}"))
    elif not request.body.get("stream"):
        writer.write(_plain(200, json.dumps(_unstreamed(fake, request)).encode()))
    elif fake.silent:
        await reader.read()  # until the client gives up
    elif fake.raw is not None:
        writer.write(fake.raw)
        writer.close()
    elif fake.status != 200 or (fake.fail_after is not None and len(fake.streamed) > fake.fail_after):
        writer.write(_plain(fake.status if fake.status != 200 else 503, fake.error_body))
    else:
        await _stream(fake, request, writer)
    await writer.drain()


def _unstreamed(fake: FakeServer, request: Request) -> dict[str, Any]:
    if request.path.endswith("/models"):
        return {"object": "list", "data": [{"id": name} for name in fake.models]}
    return {"choices": [], "usage": {"prompt_tokens": request.prompt_tokens, "completion_tokens": 1}}


def _plain(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _stream(fake: FakeServer, request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for part in fake.events(request):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
    if fake.cut:
        writer.close()
    else:
        writer.write(b"0\r\n\r\n")

"""A small HTTP/1.1 client for event streams that takes little CPU time from the server it measures.

Client and server often share a machine, so the cost of an event here is paid by the server. Hence one
process, uvloop, and an asyncio protocol that hands each read straight to httptools' C parser: no task
wakes up per event, only one at the end of a request. Every read gets one timestamp before it is parsed;
the events in it are then decoded by msgspec into a typed struct that skips all but four fields, which
takes less than a microsecond. General clients (httpx, aiohttp) wake a task for every chunk and build
Python objects on the way to it; a search for bytes instead of decoding would save little and guess.

Connections are kept alive and have TCP_NODELAY set; acknowledgements are the kernel's ordinary
delayed ones. A failed request is never repeated: it is an error of the report.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from benchmarks.errors import BenchError

_CONNECT_SECONDS = 10.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The usage field: the server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return details.cached_tokens or 0 if details else 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Answer:
    """What came back for one request, and when. Times are seconds of `time.perf_counter`."""

    started: float = 0.0
    finished: float = 0.0
    status: int = 0
    content_type: str = ""
    body: bytearray = field(default_factory=bytearray)  # the whole body of an answer that is no event stream
    # When text arrived: one time per read from the socket that held any.
    arrivals: list[float] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)  # events with text in each of those reads
    text: list[str] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    done: bool = False  # whether [DONE] has come, which ends a stream of OpenAI's protocol
    needs_done: bool = True
    error: str | None = None

    def take_event(self, data: bytes, now: float) -> None:
        """Take the data of one server-sent event that arrived at `now`."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"an event is not a chat completion chunk: {error}"
            return
        if bytes(chunk.error) not in (b"", b"null"):
            self.error = self.error or f"error event: {error_message(bytes(chunk.error))}"
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self._take_choice(choice, now)

    def _take_choice(self, choice: _Choice, now: float) -> None:
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        delta = choice.delta
        text = delta and (delta.content or delta.reasoning_content or delta.reasoning)
        if not text:
            return
        self.text.append(text)
        if self.arrivals and self.arrivals[-1] == now:
            self.deltas[-1] += 1
        else:
            self.arrivals.append(now)
            self.deltas.append(1)

    def refusal(self) -> str:
        """A status that is not 200, and what was said with it."""
        return f"HTTP {self.status}: {error_message(bytes(self.body)).rstrip('.')}"

    def fault(self) -> str | None:
        """Why this is no complete streamed answer, or None if it is one."""
        if self.error:
            return self.error
        if self.status == 0:
            return "the connection closed before any answer"
        if self.status != 200:
            return f"HTTP {self.status}: {error_message(bytes(self.body))}"
        if not self.content_type.startswith("text/event-stream"):
            return f"the answer is {self.content_type or 'of no type'} instead of text/event-stream"
        lacks = {
            "[DONE]": self.done or not self.needs_done,
            "a finish_reason": self.finish_reason,
            "a usage count": self.usage and self.usage.completion_tokens,
            "any text": self.arrivals,
        }
        missing = [what for what, present in lacks.items() if not present]
        return f"the stream ended without {' and '.join(missing)}" if missing else None


class SseSplitter:
    """Cuts a byte stream into the data of server-sent events. One `data:` line is one event, as OpenAI's
    protocol has it; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_message(body: bytes) -> str:
    """The message in an OpenAI-shaped error body, or the beginning of the body itself."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        found = body.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = " ".join(str(found).split())
    return text if len(text) <= 300 else text[:300] + "..."


class _Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time. The httptools callbacks are the `on_` methods."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._splitter = SseSplitter()
        self._answer = Answer()
        self._streaming = False
        self._complete: asyncio.Future[None] | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reusable = True

    async def exchange(self, request: bytes, answer: Answer, timeout: float) -> None:
        """Send `request` and fill `answer`. `answer.started` is set here unless it is already.

        Whatever interrupts the exchange closes the connection.
        """
        if self._transport is None:
            raise RuntimeError("the connection is not made")
        self._parser = httptools.HttpResponseParser(self)
        self._splitter = SseSplitter()
        self._answer = answer
        self._streaming = False
        self._complete = asyncio.get_running_loop().create_future()
        answer.started = answer.started or time.perf_counter()
        self._transport.write(request)
        try:
            done, _ = await asyncio.wait({self._complete}, timeout=timeout)
            if not done:
                self._fail(f"no complete answer within {timeout:g} s")
        finally:
            if not self._complete.done() or answer.error:
                self.abort()

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None or self._complete is None or self._complete.done():
            self.abort()  # nobody asked for this
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer may lawfully end here; whether it was complete is judged by its content.
        self.reusable = False
        if exc is not None:
            self._fail(f"the connection broke: {exc}")
        self._finish(time.perf_counter())

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._answer.content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        if self._parser is not None:
            self._answer.status = self._parser.get_status_code()
        answer = self._answer
        self._streaming = answer.status == 200 and answer.content_type.startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if not self._streaming:
            self._answer.body += body
            return
        for event in self._splitter.feed(body):
            self._answer.take_event(event, self._now)

    def on_message_complete(self) -> None:
        if self._parser is not None and not self._parser.should_keep_alive():
            self.reusable = False
            if self._transport is not None:
                self._transport.close()
        self._finish(self._now)

    def _fail(self, reason: str) -> None:
        if self._complete is not None and not self._complete.done():
            self._answer.error = self._answer.error or reason
            self._finish(time.perf_counter())

    def _finish(self, now: float) -> None:
        if self._complete is not None and not self._complete.done():
            self._answer.finished = now
            self._complete.set_result(None)


class Client:
    """Sends requests to one server over a pool of kept-alive connections.

    `url` is the server's root; a trailing `/v1` is taken off. `needs_done`: without [DONE] a stream is
    broken off; False for servers that never send it. `keep_alive`: False makes a connection for every request,
    for servers that close them without saying so. Raises BenchError for an unusable URL.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        needs_done: bool = True,
        keep_alive: bool = True,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise BenchError(f"{url!r} is not a server's address: write it like http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = urlsplit(self.url).path
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._needs_done = needs_done
        self._keep_alive = keep_alive
        if not keep_alive:
            self._headers["Connection"] = "close"
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def get(self, path: str) -> Answer:
        """The answer to a GET. Raises BenchError if the server cannot be reached or breaks off."""
        return await self._demand("GET", path, b"", {})

    async def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a POST of JSON that is not streamed. Raises BenchError as `get` does."""
        return await self._demand("POST", path, msgspec.json.encode(body), headers or {})

    async def stream(self, body: Mapping[str, object], headers: Mapping[str, str]) -> Answer:
        """A streamed chat completion. Never raises for what the server does: see `Answer.fault`.

        Times count from the moment the request is written, with the connection already made.
        """
        answer = Answer(needs_done=self._needs_done)
        encoded = msgspec.json.encode(body)
        try:
            await self._exchange("POST", "/v1/chat/completions", encoded, headers, answer)
        except BenchError as error:
            answer.error = str(error)
            answer.finished = time.perf_counter()
            answer.started = answer.started or answer.finished
        return answer

    async def connect(self, count: int) -> None:
        """Have `count` idle connections ready. Raises BenchError if the server cannot be reached."""
        taken = [await self._take() for _ in range(count)]
        self._idle += taken

    def close(self) -> None:
        for connection in self._all:
            connection.abort()
        self._all.clear()
        self._idle.clear()

    async def _demand(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        answer = Answer()
        await self._exchange(method, path, body, headers, answer)
        if answer.error or answer.status == 0:
            raise BenchError(f"{method} {self.url}{path} failed: {answer.fault()}.")
        return answer

    async def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        connection = await self._take()
        try:
            await connection.exchange(self._request(method, path, body, headers), answer, self._timeout)
        finally:
            if not self._keep_alive:
                connection.abort()
            if connection.reusable:
                self._idle.append(connection)
            else:
                self._all.discard(connection)

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise BenchError(f"{self.url} did not accept a connection in {_CONNECT_SECONDS:g} s.") from None
        except OSError as error:
            raise BenchError(
                f"The server at {self.url} cannot be reached ({error}): start it, or give another --url."
            ) from None
        self._all.add(connection)
        return connection

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        fields = {
            "Host": self._netloc,
            "User-Agent": "ryzanstein-bench",
            "Accept": "*/*",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
            **headers,
        }
        lines = [f"{method} {self._root}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

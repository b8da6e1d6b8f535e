"""How long a tenant's requests wait while another tenant sends the worst that it may:
`python -m benchmarks.gateway.neighbours --help`.

Our stack on the stub engine, with a key for each of the two tenants. The one tenant asks for a short chat over and
over, one at a time, and measures until its first token; the other has several connections that repeat one kind of
request, or of frames, as fast as they are answered. What a client of either, and the stub, spend of the processor's
time counts against the gateway.
"""

import asyncio
import http.client
import itertools
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.control_plane.systems import HOST, Ours
from benchmarks.errors import BenchError
from benchmarks.gateway.memory import model_directory
from benchmarks.harness import JsonFile, Sheet, publish, run
from benchmarks.serve.workloads import WORDS
from services.cli.commands.keys import open_keys
from services.gateway.server.http2 import frames
from services.gateway.server.http2.hpack import literal
from shared.keys import new_key
from shared.nats.bus import Bus

MODEL, VOCABULARY = "stub", 49_152
LIMIT_MS = 500.0  # longer than this nobody's request may wait because of another tenant's
CONNECTIONS = 8  # of the tenant that is a burden
LARGE = 3_900_000  # bytes of a large text, which fits into a body


class Waits(msgspec.Struct, frozen=True):
    """Of the other tenant's requests, in milliseconds."""

    beside: str
    # Of the tenant that is a burden, by status; `closed` for connections that were ended.
    answers: dict[str, int]
    requests: int
    median_ms: float
    longest_ms: float


# Repeats itself at a port, with a key, until it is told to end; counts what comes back.
Send = Callable[[int, str, threading.Event, Counter[str]], None]


def post(path: str, *bodies: object, method: str = "POST") -> Send:
    """Requests with these bodies in turn, on a connection that is opened again where it was ended."""
    encoded = [msgspec.json.encode(body) if body is not None else b"" for body in bodies or (None,)]

    def send(port: int, key: str, ended: threading.Event, answers: Counter[str]) -> None:
        told = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        for body in itertools.cycle(encoded):
            if ended.is_set():
                break
            try:
                connection.request(method, path, body, told)
                answer = connection.getresponse()
                answers[str(answer.status)] += 1
                if answer.headers.get_content_type() == "text/event-stream":
                    answer.read(64)
                    connection.close()  # nothing else comes of it
                else:
                    answer.read()
            except (OSError, http.client.HTTPException):
                answers["closed"] += 1
                connection.close()
        connection.close()

    return send


def http2(repeated: bytes, *, call: bool = False) -> Send:
    """Frames, in a gRPC `call` or without one, as fast as they are taken."""

    def send(port: int, key: str, ended: threading.Event, answers: Counter[str]) -> None:
        greeting = frames.PREFACE + frame(frames.SETTINGS, 0, b"") + (headers(key) if call else b"")
        while not ended.is_set():
            with socket.create_connection((HOST, port), timeout=1) as sock:
                try:
                    sock.sendall(greeting)
                    while not ended.is_set():
                        sock.sendall(repeated)
                        answers["sent"] += 1
                except OSError:
                    answers["closed"] += 1

    return send


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(key: str) -> bytes:
    """The headers of a gRPC call on stream 1."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/ryzanstein.v1.Inference/Session",
        "content-type": "application/grpc",
        "authorization": f"Bearer {key}",
    }
    block = b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())
    return frame(frames.HEADERS, 1, block, frames.END_HEADERS)


def chat(content: object, **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def words(size: int) -> str:
    generator = random.Random(size)
    return " ".join(generator.choices(WORDS, k=size // 6))


def schema_chats(count: int) -> list[object]:
    """Each with a schema that nobody has seen."""
    fields = {f"field{i}": {"enum": [f"v{i}-{j}" for j in range(20)]} for i in range(400)}
    return [
        chat("Hi", response_format={"type": "json_schema", "json_schema": {"name": f"n{i}", "schema": schema}})
        for i in range(count)
        for schema in ({"type": "object", "title": str(i), "properties": fields},)
    ]


def tool_chat() -> object:
    fields = {f"field{i}": {"type": "string", "description": "word " * 20} for i in range(100)}
    schema = {"type": "object", "properties": fields}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(128)]
    return chat("Hi", tools=tools)


def burdens() -> Iterator[tuple[str, Send | None]]:
    long, medium = words(LARGE), words(60_000)
    completion, chats = "/v1/completions", "/v1/chat/completions"
    yield "nothing", None
    yield "prompts of 3.9 MB", post(completion, {"model": MODEL, "prompt": long})
    cut = {"model": MODEL, "max_tokens": 8, "truncate_prompt_tokens": 16}
    yield "the same, to be truncated", post(completion, {**cut, "prompt": long})
    yield "prompts of 60 kB, to be truncated", post(completion, {**cut, "prompt": medium})
    yield "1,900,000 token ids", post(completion, {"model": MODEL, "prompt": [1] * 1_900_000})
    yield "messages of 3.9 MB", post(chats, chat(long))
    yield "4,000 messages", post(chats, {"model": MODEL, "messages": chat("Hi")["messages"] * 4_000})
    yield "4,000 parts", post(chats, chat([{"type": "text", "text": "word " * 100}] * 4_000))
    yield "arrays inside each other", post(chats, nested(200_000))
    yield "schemas, each another one", post(chats, *schema_chats(200))
    yield "128 tools", post(chats, tool_chat())
    yield "texts of 1 MB to count", post("/tokenize", {"model": MODEL, "prompt": long[:1_000_000]})
    yield "lists", post("/v1/files?limit=10000", method="GET")
    yield "metrics", post("/metrics", method="GET")
    yield "short requests", post(chats, chat("Hi"))
    yield "WINDOW_UPDATE frames", http2(frame(frames.WINDOW_UPDATE, 0, (1).to_bytes(4, "big")) * 1_000)
    yield "PING frames", http2(frame(frames.PING, 0, bytes(8)) * 1_000)
    yield "empty gRPC messages, in frames", http2(frame(frames.DATA, 1, bytes(5)) * 1_000, call=True)


def nested(levels: int) -> object:
    return msgspec.Raw(b'{"model":"' + MODEL.encode() + b'","messages":' + b"[" * levels + b"]" * levels + b"}")


class Measurement:
    """Of one gateway."""

    def __init__(self, ports: tuple[int, int], keys: tuple[str, str]) -> None:
        self._http, self._grpc = ports
        self._victim, self._burden = keys

    def beside(self, name: str, send: Send | None, seconds: float) -> Waits:
        ended, answers = threading.Event(), Counter[str]()
        port = self._grpc if name.endswith("frames") else self._http
        threads = [
            threading.Thread(target=send, args=(port, self._burden, ended, answers), daemon=True)
            for _ in range(CONNECTIONS if send else 0)
        ]
        for thread in threads:
            thread.start()
        waits = self._ask(time.monotonic() + seconds)
        ended.set()
        for thread in threads:
            thread.join(60)
        waits.sort()
        return Waits(name, dict(answers), len(waits), waits[len(waits) // 2], waits[-1])

    def _ask(self, until: float) -> list[float]:
        """Milliseconds to the first token, of one request after another. Raises `BenchError` where one is refused."""
        waits: list[float] = []
        headers = {"authorization": f"Bearer {self._victim}", "content-type": "application/json"}
        while time.monotonic() < until:
            body = msgspec.json.encode(chat(f"Hello {len(waits)}", stream=True))
            begun = time.perf_counter()
            connection = http.client.HTTPConnection(HOST, self._http, timeout=60)
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise BenchError(f"The other tenant's request was refused: {answer.read().decode()}")
            answer.read(6)
            waits.append((time.perf_counter() - begun) * 1e3)
            connection.close()
        return waits


async def measured(seconds: float, only: str) -> list[Waits]:
    """Raises `BenchError`."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        model_directory(model, VOCABULARY)
        ours = Ours(Path(folder) / "data", model=model, grpc=True)
        await ours.start()
        try:
            keys = [new_key(tenant, time.time()) for tenant in ("victim", "burden")]
            bus = await Bus.connect(ours.nats_settings, "benchmark")
            bucket = await open_keys(bus)
            for key in keys:
                await bucket.create(key.identity, key.record)
            await bus.close()
            grpc_port = int(ours.grpc_address.rpartition(":")[2])
            measurement = Measurement((ours.port, grpc_port), (keys[0].token, keys[1].token))
            kinds = [(name, send) for name, send in burdens() if only in name]
            return [await asyncio.to_thread(measurement.beside, *kind, seconds) for kind in kinds]
        finally:
            await ours.stop()


def sheet(waits: list[Waits]) -> Sheet:
    rows = []
    for row in waits:
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(row.answers.items()))
        rows.append((row.beside, answers, f"{row.requests:,}", f"{row.median_ms:.1f}", f"{row.longest_ms:.0f}"))
    head = ("beside", "its answers", "requests", "median, ms", "longest, ms")
    return Sheet(head, rows, left=("its answers",))


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Of each burden.")] = 10.0,
    only: Annotated[str, typer.Option(help="Only burdens with this in their names.")] = "",
    json: JsonFile = None,
) -> None:
    """How long a tenant's requests wait beside another tenant. Exits with 1 where one waits for more than half a
    second."""
    waits = asyncio.run(measured(seconds, only))
    publish(waits, sheet(waits), json=json)
    raise typer.Exit(int(any(row.longest_ms > LIMIT_MS for row in waits)))


if __name__ == "__main__":
    run(main)

"""The same work over gRPC and over REST: `python -m benchmarks.gateway.grpc_rest --help`.

Our stack on the stub engine without delay. Each request is a chat of one short message. Clients take turns, in closed
loops; they look through the answers' bytes for the end and decode nothing, on kept-alive connections (REST) and on one
connection (gRPC). CPU time is of the gateway's process and of the client's, per request. With --edge the
gateway has no NATS around it and makes its tokens itself (`edge.py`).
"""

import asyncio
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
import uvloop

from benchmarks.control_plane.load_client import http_request
from benchmarks.control_plane.systems import HOST, SEED, Ours
from benchmarks.gateway.edge import Edge
from benchmarks.harness import JsonFile, Rounds, Sheet, median, nearest, publish
from benchmarks.harness import run as run_program
from benchmarks.processes import cpu_seconds
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.server.http2.frames import PREFACE
from services.gateway.server.http2.hpack import literal

# A request for so many tokens, streamed or not; returns the characters or tokens that came.
Ask = Callable[[int, bool], Awaitable[int]]

Served = Ours | Edge
Connect = Callable[[Served, int], AbstractAsyncContextManager[Ask]]

CHAT = "/ryzanstein.v1.InferenceService/Chat"
QUESTION = "What is the capital of France?"
CASES = ((16, False), (16, True), (128, True))


class Figure(msgspec.Struct, frozen=True):
    """One client's run, or the median of several."""

    gateway_us: float
    client_us: float
    p50_ms: float
    p99_ms: float
    per_second: float


class Run(NamedTuple):
    client: str
    tokens: int
    streamed: bool
    loops: int


def body(tokens: int, streamed: bool) -> dict[str, object]:
    fields: dict[str, object] = {
        "model": "stub",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": tokens,
        "seed": SEED,
    }
    return fields | ({"stream": True, "stream_options": {"include_usage": True}} if streamed else {})


@asynccontextmanager
async def raw_client(ours: Served, loops: int) -> AsyncIterator[Ask]:
    free = [await asyncio.open_connection(HOST, ours.port) for _ in range(loops)]
    every = list(free)
    requests = {case: http_request(HOST, ours.port, msgspec.json.encode(body(*case))) for case in CASES}

    async def ask(tokens: int, streamed: bool) -> int:
        connection = free.pop()
        reader, writer = connection
        writer.write(requests[tokens, streamed])
        head = await reader.readuntil(b"\r\n\r\n")
        if streamed:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        free.append(connection)
        return tokens

    try:
        yield ask
    finally:
        for _, writer in every:
            writer.close()


class _RawGrpc:
    """One HTTP/2 connection with constant requests; answers are looked through for their ends alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._writer = writer
        self._next = 1
        self._waiting: dict[int, asyncio.Future[None]] = {}
        settings = struct.pack(">HL", 4, 1 << 30)  # initial window
        window = ((1 << 31) - 1 - 65_535).to_bytes(4, "big")
        writer.write(PREFACE + _frame(4, 0, 0, settings) + _frame(8, 0, 0, window))
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", CHAT), (":authority", address)]
        pairs += [("content-type", "application/grpc"), ("te", "trailers")]
        self._headers = b"".join(literal(name.encode(), value.encode()) for name, value in pairs)
        self._reading = asyncio.create_task(self._read(reader))

    async def ask(self, message: bytes) -> None:
        number, self._next = self._next, self._next + 2
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        data = struct.pack(">BL", 0, len(message)) + message
        self._writer.write(_frame(1, 4, number, self._headers) + _frame(0, 1, number, data))
        await done

    async def _read(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while data := await reader.read(1 << 16):
            buffer, at = rest + data, 0
            while len(buffer) - at >= 9:
                high, low, kind, flags, number = struct.unpack_from(">HBBBL", buffer, at)
                size = high << 8 | low
                if len(buffer) - at - 9 < size:
                    break
                at += 9 + size
                if kind == 1 and flags & 1:
                    self._waiting.pop(number).set_result(None)
                elif kind == 6 and not flags & 1:
                    self._writer.write(_frame(6, 1, 0, buffer[at - size : at]))
            rest = buffer[at:]

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 0xFF, kind, flags, number) + payload


def chat_request(tokens: int, streamed: bool) -> pb.ChatRequest:
    return pb.ChatRequest(
        model="stub",
        messages=[pb.ChatMessage(role=pb.ROLE_USER, content=QUESTION)],
        sampling=pb.SamplingParameters(max_tokens=tokens, seed=SEED),
        output=pb.OutputOptions(kind=pb.OUTPUT_KIND_TEXT, whole=not streamed),
    )


@asynccontextmanager
async def raw_grpc_client(ours: Served, loops: int) -> AsyncIterator[Ask]:
    host, _, port = ours.grpc_address.rpartition(":")
    raw = _RawGrpc(*await asyncio.open_connection(host, int(port)), ours.grpc_address)
    requests = {case: chat_request(*case).SerializeToString() for case in CASES}

    async def ask(tokens: int, streamed: bool) -> int:
        await raw.ask(requests[tokens, streamed])
        return tokens

    try:
        yield ask
    finally:
        await raw.close()


CLIENTS: dict[str, Connect] = {"rest raw": raw_client, "grpc raw": raw_grpc_client}


async def measure(ours: Served, ask: Ask, run: Run, requests: int) -> Figure:
    """`requests` requests in `loops` closed loops. Raises ValueError for an answer of the wrong length."""
    gateway = {"gateway": ours.processes()["gateway"]}
    times: list[float] = []

    async def loop(count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            got = await ask(run.tokens, run.streamed)
            times.append(time.perf_counter() - began)
            if got != run.tokens:
                raise ValueError(f"{run.client} got {got} of {run.tokens} tokens.")

    each = max(1, requests // run.loops)
    before, mine, began = cpu_seconds(gateway)["gateway"], time.process_time(), time.perf_counter()
    await asyncio.gather(*(loop(each) for _ in range(run.loops)))
    seconds, count = time.perf_counter() - began, each * run.loops
    return Figure(
        gateway_us=(cpu_seconds(gateway)["gateway"] - before) / count * 1e6,
        client_us=(time.process_time() - mine) / count * 1e6,
        p50_ms=nearest(times, 0.5) * 1e3,
        p99_ms=nearest(times, 0.99) * 1e3,
        per_second=count / seconds,
    )


async def compare(ours: Served, rounds: int, requests: int, at_once: Sequence[int]) -> dict[Run, list[Figure]]:
    found: dict[Run, list[Figure]] = {}
    names = list(CLIENTS)
    await ours.start()
    try:
        for loops in at_once:
            async with AsyncExitStack() as stack:
                clients = {name: await stack.enter_async_context(CLIENTS[name](ours, loops)) for name in names}
                for at in range(rounds + 1):  # the first warms up
                    for tokens, streamed in CASES:
                        for name in names[at % len(names) :] + names[: at % len(names)]:
                            run = Run(name, tokens, streamed, loops)
                            share = requests // (4 if loops == 1 else 1) // (2 if tokens > 16 else 1)
                            figure = await measure(ours, clients[name], run, share if at else share // 4)
                            if at:
                                found.setdefault(run, []).append(figure)
    finally:
        await ours.stop()
    return found


def sheet(found: dict[Run, Figure]) -> Sheet:
    rows = []
    for run in sorted(found, key=lambda run: (run.loops, run.streamed, run.tokens)):
        one = found[run]
        what = f"{run.tokens} tokens{', streamed' if run.streamed else ''}"
        times = (f"{one.gateway_us:.0f}", f"{one.client_us:.0f}", f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}")
        rows.append((run.loops, what, run.client, *times, f"{one.per_second:.0f}"))
    head = ("loops", "request", "client", "gateway us", "client us", "p50 ms", "p99 ms", "requests/s")
    return Sheet(head, rows, left=("request", "client"))


def main(
    rounds: Rounds = 5,
    requests: Annotated[int, typer.Option(help="Requests of a run; a quarter in one loop.", min=64)] = 1024,
    loops: Annotated[str, typer.Option(help="Requests at a time, with commas.")] = "1,64",
    edge: Annotated[bool, typer.Option("--edge", help="The gateway without NATS; more at a time tells more.")] = False,
    json: JsonFile = None,
) -> None:
    """CPU time and latency of a request over gRPC and REST, of the gateway and of the client."""
    at_once = [int(each) for each in loops.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(compare(Edge() if edge else Ours(Path(folder), grpc=True), rounds, requests, at_once))
    rows = [{**run._asdict(), "runs": figures} for run, figures in found.items()]
    publish(rows, sheet({run: median(figures) for run, figures in found.items()}).markdown(), json=json)


if __name__ == "__main__":
    run_program(main)

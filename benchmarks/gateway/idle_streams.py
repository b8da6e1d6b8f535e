"""What a stream that waits for its next token costs a gateway: `python -m benchmarks.gateway.idle_streams --help`.

A gateway in a process of its own on a NATS of its own. In the place of a ring this process gives every generation its
first token, and never another. The gateway's proportional set size (PSS) at some streams and at all of them: the
difference is what a stream holds, its connection and its share of all tables. What the system keeps for a socket is
not in it.
"""

import asyncio
import os
import random
import resource
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.control_plane.load_client import http_request
from benchmarks.control_plane.systems import HOST
from benchmarks.errors import BenchError
from benchmarks.gateway.memory import model_directory
from benchmarks.harness import JsonFile, publish, run
from benchmarks.peers.servers import free_port
from benchmarks.processes import nats_variables, status_bytes
from benchmarks.serve.workloads import WORDS
from services.cli.supervision.nats_server import LocalNats
from shared.errors import RyzansteinError
from shared.messages import (
    FinishReason,
    GenerationRequest,
    Heartbeat,
    ModelCard,
    TokenEntry,
    TokenFrame,
    TokenizerBundle,
)
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import Bucket
from shared.nats.objects import Objects
from shared.nats.streams import ensure_streams
from shared.process import die_with_parent

MODEL = "idle"
VOCABULARY = 49_152
OTHER_FILES = 600
"""Files of a process that are no stream."""
AT_ONCE = 64
"""Streams that are opened together."""
PATIENCE = 60.0


class Found(msgspec.Struct, frozen=True):
    streams: int
    prompt_tokens: int
    warm_up: int
    before_kib: int
    """PSS of the gateway with the streams of the warm-up."""
    after_kib: int
    """The same with all of them."""

    @property
    def bytes_each(self) -> float:
        return (self.after_kib - self.before_kib) * 1024 / (self.streams - self.warm_up)


class SilentRing:
    """Takes every request of the queue, and answers with one token, which may be its last (`finish`)."""

    def __init__(self, bus: Bus, finish: FinishReason = "") -> None:
        self._bus = bus
        self._finish: FinishReason = finish
        self.prompt_tokens = 0
        """Of the last request."""

    async def offer_model(self, bundle: TokenizerBundle) -> None:
        """Tells gateways of the model, and gives them its tokenizer."""
        store = Objects(self._bus, subjects.TOKENIZERS_STORE)
        await store.open()
        await store.put(MODEL, encode(bundle))
        card = ModelCard(MODEL, 8192, VOCABULARY, [0], tokenizer=MODEL, created=1_700_000_000)
        await (await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)).put(MODEL, card)

    async def run(self) -> None:
        source = await self._bus.jetstream().pull_subscribe(
            subjects.ALL_INTAKE, durable="silent-ring", stream=subjects.INTAKE_STREAM
        )
        step = 0
        while True:
            try:
                messages = await source.fetch(AT_ONCE, timeout=1)
            except TimeoutError:
                continue
            step += 1
            frames: dict[str, list[TokenEntry]] = {}
            for message in messages:
                await message.ack()
                request = msgspec.msgpack.decode(message.data, type=GenerationRequest)
                self.prompt_tokens = len(request.prompt)
                entry = TokenEntry(
                    request.generation_id, request.attempt, 0, [request.prompt[0]], self._finish
                )
                frames.setdefault(request.consumer, []).append(entry)
            for consumer, entries in frames.items():
                frame = TokenFrame("silent", 1, step, entries)
                await self._bus.publish(subjects.tokens(consumer), frame)


class Gateway:
    """`python -m services.gateway` on this NATS; use as an asynchronous context manager."""

    def __init__(self, nats: LocalNats, bus: Bus, folder: Path, streams: int) -> None:
        self._nats = nats
        self._bus = bus
        self._log = folder / "gateway.log"
        self._streams = streams
        self._ready = asyncio.Event()
        self.port, self.grpc_port = free_port(), free_port()
        self.pid = 0

    async def __aenter__(self) -> "Gateway":
        async def on_beat(beat: Heartbeat) -> None:
            if beat.service == "gateway" and beat.state == "ready" and MODEL in beat.models:
                self._ready.set()

        await self._bus.subscribe(subjects.ALL_BEATS, Heartbeat, on_beat)
        limits = {"CONNECTIONS": self._streams, "GENERATIONS": self._streams}
        environment = {
            **os.environ,
            **nats_variables(self._nats.settings()),
            "RYZANSTEIN_LOG_LEVEL": "warning",
            **{f"RYZANSTEIN_MAX_{name}": str(most) for name, most in limits.items()},
            **{f"RYZANSTEIN_{name}_TIMEOUT": "3600" for name in ("STALL", "TOKEN")},
        }
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.gateway", "--host", HOST, "--port", str(self.port)),
                *("--grpc-port", str(self.grpc_port)),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        self.pid = self._process.pid
        try:
            await asyncio.wait_for(self._ready.wait(), PATIENCE)
        except TimeoutError:
            await self.__aexit__()
            said = self._log.read_text(errors="replace")[-300:]
            raise BenchError(f"The gateway was not ready after {PATIENCE:g} s: {said}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()

    def pss_kib(self) -> int:
        if size := status_bytes(self.pid, "smaps_rollup", "Pss"):
            return size >> 10
        raise BenchError(
            "The system does not say how much memory a process has: /proc/PID/smaps_rollup has no Pss."
        )


def allowed(streams: int) -> int:
    """As many of these as this process and the gateway may open files for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reached = streams if hard == resource.RLIM_INFINITY else min(streams, hard - OTHER_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached + OTHER_FILES, hard))
    return reached


def bundle() -> TokenizerBundle:
    with tempfile.TemporaryDirectory() as folder:
        model_directory(Path(folder), VOCABULARY)
        return TokenizerBundle({path.name: path.read_bytes() for path in Path(folder).iterdir()})


def requests(port: int, words: int) -> Iterator[bytes]:
    """Chats that are streamed, each of other words."""
    generator = random.Random(words)
    while True:
        text = " ".join(generator.choices(WORDS, k=words))
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
        yield http_request(HOST, port, msgspec.json.encode(body))


async def opened(port: int, request: bytes) -> socket.socket:
    """A connection whose stream has brought its first token."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, (HOST, port))
    await loop.sock_sendall(sock, request)
    came = b""
    while b"data: " not in came:
        part = await loop.sock_recv(sock, 4096)
        came += part
        if not part or (b"\r\n" in came and b" 200 " not in came.partition(b"\r\n")[0]):
            sock.close()
            raise BenchError(f"A stream was refused: {came[:300].decode(errors='replace')}")
    return sock


@asynccontextmanager
async def answered_gateway(
    streams: int, finish: FinishReason = ""
) -> AsyncIterator[tuple[Gateway, SilentRing, Bus]]:
    """A gateway on a NATS of its own, whose generations get their first token here. Raises `BenchError`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nats = LocalNats(folder / "nats")
        try:
            await nats.start(die_with_parent())
            bus = await Bus.connect(nats.settings(), "benchmark")
        except RyzansteinError as error:
            raise BenchError(str(error)) from None
        await ensure_streams(bus)
        ring = SilentRing(bus, finish)
        await ring.offer_model(bundle())
        answering = asyncio.create_task(ring.run())
        try:
            async with Gateway(nats, bus, folder, streams) as gateway:
                yield gateway, ring, bus
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            await bus.close()
            await nats.stop()


async def measured(streams: int, warm_up: int, words: int) -> Found:
    """Raises `BenchError`."""
    async with answered_gateway(streams) as (gateway, ring, _):
        return await _held(gateway, ring, streams, warm_up, words)


async def _held(gateway: Gateway, ring: SilentRing, streams: int, warm_up: int, words: int) -> Found:
    bodies, held, sizes = requests(gateway.port, words), list[socket.socket](), list[int]()
    try:
        for count in (warm_up, streams):
            while len(held) < count:
                new = min(AT_ONCE, count - len(held))
                held += await asyncio.gather(*(opened(gateway.port, next(bodies)) for _ in range(new)))
            sizes.append(gateway.pss_kib())
    finally:
        for sock in held:
            sock.close()
    return Found(streams, ring.prompt_tokens, warm_up, *sizes)


def main(
    streams: Annotated[int, typer.Option(min=100, help="Streams that are open at the end.")] = 10_000,
    words: Annotated[int, typer.Option(min=1, help="Words of each prompt, about a token each.")] = 100,
    json: JsonFile = None,
) -> None:
    """Memory of a gateway for each stream that waits."""
    may = allowed(streams)
    if may < streams:
        typer.echo(f"{may:,} streams: `ulimit -Hn` allows no more.", err=True)
    found = asyncio.run(measured(may, may // 10, words))
    said = (
        f"{found.streams:,} idle streams of {found.prompt_tokens} prompt tokens: {found.after_kib / 1024:.0f} MiB of "
        f"PSS, {found.before_kib / 1024:.0f} MiB with {found.warm_up:,}; {found.bytes_each / 1024:.1f} KiB each"
    )
    publish(found, said, json=json)


if __name__ == "__main__":
    run(main)

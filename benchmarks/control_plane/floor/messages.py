"""What a message costs sender, receiver and broker: the same bytes over bare nats-py and over `shared.nats`.

    frame     a step's tokens of 64 streams: published, and handed to a subscription's handler
    stored    a request of 52 prompt tokens: published into a stream, and acknowledged by it
    request   the same with an answer: asked, handed to a handler, answered

nats-py's side sends and takes bytes; ours encodes MessagePack and decodes it with its checks, as services do. The
sender is this process, under uvloop; the receiver one of its own.
"""

import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from benchmarks.process_cpu import cpu_seconds
from benchmarks.processes import Child, nats_variables, python
from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings, load_settings
from shared.messages import GenerationRequest, TokenEntry, TokenFrame
from shared.nats.bus import Bus, encode
from shared.process import die_with_parent, freeze_gc_after_startup

COUNT = 4000
"""Messages of a kind in a round."""
AT_ONCE = 64
STREAM = "FLOOR"
FRAME = TokenFrame("group-0", 1, 1, [TokenEntry(f"{at:032x}", 0, 20, [1000 + at]) for at in range(AT_ONCE)])
REQUEST = GenerationRequest("0" * 32, "1" * 32, "stub", "gateway-0", list(range(1000, 1052)), 16)
BARE, OURS = "nats-py", "shared.nats"
Send = Callable[[], Awaitable[object]]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds of one message, medians over the rounds."""

    kind: str
    client: str
    """On both sides."""
    size: int
    """Bytes of the message."""
    sender_us: float
    receiver_us: float
    broker_us: float


class Messages:
    """A broker, a receiver in a process of its own, and both clients here."""

    def __init__(self, bus: Bus, bare: Client, processes: dict[str, list[int]]) -> None:
        self._processes = processes
        stream = bare.jetstream()
        frame, request = encode(FRAME), encode(REQUEST)
        self._senders: dict[tuple[str, str, int], Send] = {
            ("frame", BARE, len(frame)): lambda: bare.publish("frame.bare", frame),
            ("frame", OURS, len(frame)): lambda: bus.publish("frame.ours", FRAME),
            ("stored", BARE, len(request)): lambda: stream.publish("stored.bare", request, timeout=10),
            ("stored", OURS, len(request)): lambda: bus.publish_durable("stored.ours", REQUEST, timeout=10),
            ("request", BARE, len(request)): lambda: bare.request("request.bare", request, timeout=10),
            ("request", OURS, len(request)): lambda: bus.request(
                "request.ours", REQUEST, GenerationRequest, timeout=10
            ),
        }
        self._answered = [self._senders["request", client, len(request)] for client in (BARE, OURS)]
        self._found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = defaultdict(list)

    @classmethod
    @contextlib.asynccontextmanager
    async def session(cls, folder: Path) -> AsyncIterator["Messages"]:
        """Raises `BenchError` where the receiver does not start."""
        server = LocalNats(folder / "nats")
        await server.start(die_with_parent())
        settings = server.settings()
        command = python("benchmarks.control_plane.floor.messages")
        receiver = Child("The receiver of messages", command, variables=nats_variables(settings))
        await receiver.start()
        bus = await Bus.connect(settings, "sender")
        bare = await _bare(settings)
        try:
            await bare.jetstream().add_stream(StreamConfig(name=STREAM, subjects=["stored.*"]))
            yield cls(bus, bare, {"receiver": [receiver.pid], "broker": [server.pid]})
        finally:
            await bare.close()
            await bus.close()
            await receiver.stop()
            await server.stop()

    async def _settle(self) -> None:
        """Until the receiver has taken what was sent before, on both connections."""
        for ask in self._answered:
            await ask()

    async def round(self, count: int = COUNT) -> None:
        """`count` messages of each kind by each client, `AT_ONCE` of them under way."""
        for kind, send in self._senders.items():
            await self._settle()
            began, before = time.thread_time(), cpu_seconds(self._processes)
            for _ in range(count // AT_ONCE):
                await asyncio.gather(*(send() for _ in range(AT_ONCE)))
                await asyncio.sleep(0)  # what was published leaves now, as where it is not all of a run
            own = time.thread_time() - began
            await self._settle()
            after = cpu_seconds(self._processes)
            sent = count // AT_ONCE * AT_ONCE
            costs = (own, *(after[name] - before[name] for name in ("receiver", "broker")))
            self._found[kind].append(tuple(cost * 1e6 / sent for cost in costs))  # type: ignore[arg-type]

    def costs(self) -> list[Cost]:
        """Of the rounds so far."""
        found = []
        for (kind, client, size), rounds in self._found.items():
            own, receiver, broker = (statistics.median(column) for column in zip(*rounds, strict=True))
            figures = {"sender_us": own, "receiver_us": receiver, "broker_us": broker}
            found.append(Cost(kind=kind, client=client, size=size, **figures))
        return found


async def _bare(settings: CommonSettings) -> Client:
    password = settings.nats_password.get_secret_value()
    return await nats.connect(settings.nats_url, user=settings.nats_user or None, password=password or None)


# --- the receiver --------------------------------------------------------------------------------


async def receive() -> None:
    """Takes and answers; prints a line once it does. Runs until it is killed."""
    settings = load_settings(CommonSettings)
    bus, bare = await Bus.connect(settings, "receiver"), await _bare(settings)

    async def take_bytes(_: Msg) -> None: ...

    async def answer_bytes(message: Msg) -> None:
        await message.respond(message.data)

    async def take(_: TokenFrame) -> None: ...

    async def answer(request: GenerationRequest) -> GenerationRequest:
        return request

    await bare.subscribe("frame.bare", cb=take_bytes)
    await bare.subscribe("request.bare", cb=answer_bytes)
    await bus.subscribe("frame.ours", TokenFrame, take)
    await bus.subscribe("request.ours", GenerationRequest, answer)
    await bare.flush()
    await bus.flush()
    freeze_gc_after_startup()
    print("receiving", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(receive())

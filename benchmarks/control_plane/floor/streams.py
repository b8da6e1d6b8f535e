"""What the control plane's parts cost where nothing else is done: the floor under its figures.

    a stream of events   the same response from a server in C, and from uvicorn with an app of ten lines
    a message            the same bytes over bare nats-py and over `shared.nats`, which also encodes and checks them

The servers take turns under the load client of the closed loop; of messages see `messages.py`, of what being woken
costs `wake_ups.py`.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from benchmarks.control_plane.bench import Bench, Tell, running
from benchmarks.control_plane.floor.messages import Cost, Messages
from benchmarks.control_plane.floor.wake_ups import WakeUps, lines
from benchmarks.control_plane.load_client import Measured, built, http_request, median_run
from benchmarks.control_plane.systems import HOST, body
from benchmarks.harness import Report, Sheet
from benchmarks.peers.servers import free_port
from benchmarks.processes import Child, python

_SOURCE = Path(__file__).with_name("sse_echo.c")
WORD = "a"
"""What each token says."""


def events(tokens: int) -> list[bytes]:
    """Server-sent events of a streamed chat, as the gateway writes them: one for each token, and those around them."""
    about = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "stub",
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *[{"content": WORD}] * tokens]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "length"})
    chunks: list[dict[str, Any]] = [about | {"choices": [choice]} for choice in choices]
    usage = {"prompt_tokens": 50, "completion_tokens": tokens, "total_tokens": 50 + tokens}
    chunks.append(about | {"choices": [], "usage": usage})
    return [b"data: %b\n\n" % part for part in (*map(msgspec.json.encode, chunks), b"[DONE]")]


def response(tokens: int) -> bytes:
    """The whole response, a chunk for each event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in events(tokens)) + b"0\r\n\r\n"


class Server:
    """A process that serves `response` at a port of its own, to be measured as the whole stack is."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """`command`: PORT stands for the port; it prints a line once it listens."""
        self.name = name
        self.port = free_port()
        self._child = Child(name, [str(self.port) if word == "PORT" else word for word in command])

    async def start(self) -> None:
        await self._child.start()

    async def stop(self) -> None:
        await self._child.stop()

    def processes(self) -> Mapping[str, list[int]]:
        return {"server": [self._child.pid]}

    def request(self, tokens: int) -> bytes:
        return http_request(HOST, self.port, body("stub", tokens, {}))

    def text(self, tokens: int) -> str:
        return WORD * tokens


def servers(folder: Path, tokens: int) -> list[Server]:
    """The floors of a stream. Raises BenchError where there is no C compiler."""
    program, whole = built(_SOURCE, folder), folder / "response"
    whole.write_bytes(response(tokens))
    return [
        Server("C, one write", [str(program), "PORT", str(whole), "0"]),
        Server("C, a write for each event", [str(program), "PORT", str(whole), "1"]),
        Server("uvicorn", python("benchmarks.control_plane.floor.streams", "PORT", tokens)),
    ]


class Floor(Report, frozen=True, kw_only=True):
    tokens: int
    connections: int
    streams: dict[str, list[Measured]]
    """By server, round by round."""
    messages: list[Cost]
    wake_ups: WakeUps

    @property
    def clean(self) -> bool:
        return all(run.figures.clean for runs in self.streams.values() for run in runs)

    def parts(self) -> list[Sheet | str]:
        """A table of streams, one of messages, and wake-ups."""
        servers, messages = [], []
        for name, runs in self.streams.items():
            cpu = statistics.median(run.cpu_ms["server"] for run in runs) * 1e3
            faults = sum(sum(run.figures.faults.values()) for run in runs)
            rate = median_run(runs).figures.requests_per_second
            servers.append((name, f"{rate:,.0f}", f"{cpu:,.1f}", faults))
        for cost in self.messages:
            each = (f"{one:.1f}" for one in (cost.sender_us, cost.receiver_us, cost.broker_us))
            messages.append((cost.kind, cost.client, f"{cost.size:,}", *each))
        head = ("message, CPU us of each", "client", "bytes", "sender", "receiver", "broker")
        return [
            Sheet(("server", "requests/s", "CPU us per request", "faults"), servers),
            Sheet(head, messages, left=("client",)),
            *lines(self.wake_ups),
        ]


async def streams(
    bench: Bench, folder: Path, tokens: int, rounds: int, tell: Tell
) -> dict[str, list[Measured]]:
    """The servers in turns, in the closed loop."""
    systems = servers(folder, tokens)
    async with running(systems, tell):
        for system in systems:
            await bench.warm_up(system)
        return await bench.closed(systems, rounds)


async def messages(folder: Path, rounds: int, tell: Tell) -> list[Cost]:
    """Every kind of message, bare and ours in turns."""
    async with Messages.session(folder) as found:
        for at in range(rounds):
            tell(f"messages: round {at + 1} of {rounds}")
            await found.round()
        return found.costs()


# --- the app under uvicorn -----------------------------------------------------------------------


class App:
    """An ASGI app that reads the request and sends the events, one after the other."""

    def __init__(self, tokens: int) -> None:
        self._events = events(tokens)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Told(uvicorn.Server):
    """Says that it serves."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print("serving", flush=True)


def serve(port: int, tokens: int) -> None:
    """uvicorn as the gateway has it: uvloop, httptools, no log of accesses. Runs until it is killed."""
    options: dict[str, Any] = {"http": "httptools", "loop": "uvloop", "ws": "none", "lifespan": "off"}
    config = uvicorn.Config(App(tokens), HOST, port, log_level="warning", access_log=False, **options)
    _Told(config).run()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))

"""Operations and bytes of fixed work: `python -m benchmarks.regressions.counts [--record]`.

    calls    of Python functions of this repository, from sys.setprofile: what the interpreter has to do
    bytes    of messages as they are on the wire
    instructions of products at AVX2, by valgrind where it is installed (`instructions.py`)
    messages that a running stack has stored; counted and compared in tests/integration/test_message_counts.py

They do not depend on the machine or on what else runs there. A number that grows is more work per token, whether or
not a clock can see it today.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, cast

import msgspec
import typer
from prometheus_client import CollectorRegistry

from benchmarks.engine.bookkeeping import BLOCK
from benchmarks.gateway.edge import edge_parts
from benchmarks.harness import Sheet, run, show
from benchmarks.regressions import instructions
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.leader.frames import Gathering, acknowledgements
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.asgi import CONNECTION
from services.gateway.core.catalog import Catalog
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.registry import ModelRegistry
from services.gateway.core.settings import GatewaySettings
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.generations import Generations
from services.gateway.lifecycle.token_stream import GenerationLimits
from shared.config import CommonSettings
from shared.messages import (
    DispatchBatch,
    GenerationRequest,
    GroupBeat,
    GroupLoad,
    Heartbeat,
    RankBeat,
    SamplingParams,
    TokenEntry,
    TokenFrame,
)
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats.bus import Bus, encode
from shared.nats.client import NatsClient
from shared.service.logs import configure_logging

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/recorded/counts.json"
# By how much a count may grow, by its unit (the last word of its name): calls of a request may grow by a few, as a
# field is added; bytes and messages on the wire may not.
ALLOWED = {"bytes": 0.0, "calls": 0.03, "instructions": 0.05, "messages": 0.0}  # compilers differ a little
AT_ONCE = 64  # sequences of a full batch

_OURS = (f"{ROOT}/services/", f"{ROOT}/shared/")


class Calls:
    """How many functions of this repository were called."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self.count += 1


@contextmanager
def counting() -> Iterator[Calls]:
    """Counts until the block ends."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


# --- executor ------------------------------------------------------------------------------------


def full_batch(sequences: int, steps: int) -> tuple[Scheduler, Gathering, list[SampledToken]]:
    """Sequences that go on for that many steps, what gathers their tokens into frames, and one token of each."""
    batcher = Scheduler(EngineSpec(BLOCK, 4096, 8192, 1000), BatchSettings(), "counts")
    for number in range(sequences):
        batcher.add(request(number, prompt=4, output=steps + 8))
    return batcher, Gathering(), [SampledToken(7)] * sequences


def decode_steps(sequences: int, steps: int) -> int:
    """Calls of that many decode steps of the batcher, and of what gathers their tokens into frames."""
    batcher, gathering, answers = full_batch(sequences, steps)
    for at in range(4):
        _step(batcher, gathering, answers, float(at))
    with counting() as calls:
        for at in range(steps):
            _step(batcher, gathering, answers, 100.0 + at)
    return calls.count


def steps_ahead(sequences: int, steps: int) -> int:
    """The same, each step planned while the one before it is under way."""
    batcher, gathering, answers = full_batch(sequences, steps)
    assert batcher.schedule() is not None
    with counting() as calls:
        for at in range(steps):
            assert batcher.schedule_ahead(float(at)) is not None
            gathering.add(batcher.update(answers, 0.01))
            gathering.take(float(at))
    return calls.count


def whole_requests(count: int) -> int:
    """Calls of that many requests of one token, one after the other: each is taken on, computed and over."""
    batcher = Scheduler(EngineSpec(BLOCK, 4096, 8192, 1000), BatchSettings(), "counts")
    gathering = Gathering()
    with counting() as calls:
        for number in range(count):
            one = request(number, prompt=64, output=1)
            assert batcher.add(one, float(number)) is None
            gathering.add(acknowledgements([one], {one.generation_id}))
            _step(batcher, gathering, [SampledToken(7)], float(number))
    return calls.count


def _step(batcher: Scheduler, gathering: Gathering, answers: list[SampledToken], now: float) -> None:
    scheduled = batcher.schedule(now)
    assert scheduled is not None
    _, rows = scheduled
    gathering.add(batcher.update(answers[: len(rows)], 0.01))
    gathering.take(now)


def request(number: int, *, prompt: int, output: int) -> GenerationRequest:
    name = f"{number:032x}-0"
    sampling = SamplingParams(temperature=0.0, seed=number)
    return GenerationRequest(
        name, "req-0", "stub", "gateway-0", [number % 200] * prompt, output, sampling, session="session-0"
    )


# --- gateway -------------------------------------------------------------------------------------


def shared_frames(generations: int, frames: int) -> int:
    """Calls of a gateway that takes frames apart in which each of its generations has a token."""
    bus = Bus(NatsClient(), CommonSettings())  # never connected: nothing here is said to anybody
    rings = Catalog(bus, ModelRegistry(bus), AdapterRegistry(bus, 0.0), on_card=lambda card: None)
    life = Generations(bus, "gateway-0", GatewaySettings(), GatewayMetrics(CollectorRegistry()), rings)
    limits = GenerationLimits(5, 600.0, 5.0, 0.0)
    each = [request(number, prompt=4, output=1000) for number in range(generations)]
    life.add([Generation(one, 0, limits, now=0.0, started_at=0.0) for one in each])
    with counting() as calls:
        for at in range(frames):
            entries = [TokenEntry(one.generation_id, 0, at, [65]) for one in each]
            life.on_frame(TokenFrame("group-0", 1, at, entries))
    return calls.count


_ASKED: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "x"}]}
# What answers the same in each API: its path, and what its body has beside model and messages for so many tokens.
APIS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda tokens: {"max_tokens": tokens, "seed": 7}),
    "Ollama's chat": ("/api/chat", lambda tokens: {"options": {"num_predict": tokens, "seed": 7}}),
    "Anthropic's message": ("/v1/messages", lambda tokens: {"max_tokens": tokens}),
}


def answered(tokens: int, *, stream: bool, api: str = "chat") -> int:
    """Calls of a gateway that answers so many tokens, which come one by one; NATS and sockets left out."""
    return asyncio.run(_answered(tokens, api, stream=stream))


async def _answered(tokens: int, api: str, *, stream: bool) -> int:
    parts = edge_parts()
    path, fields = APIS[api]
    body = json.dumps(_ASKED | fields(tokens) | {"stream": stream}).encode()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    class Open:
        """A connection that takes everything, and whose client stays."""

        def body(self) -> bytes:
            return body

        def write(self, part: bytes) -> bool:
            sent.append({"body": part})
            return True

        def watch(self, gone: Callable[[], None] | None) -> None:
            pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "query_string": b"",
        "extensions": {CONNECTION: Open()},
    }
    with counting() as calls:
        task = asyncio.create_task(parts.app(cast(Any, scope), receive, cast(Any, send)))
        for _ in range(tokens):
            await _quiet()
            parts.answers.say(1)
        await task
    assert sent[0]["status"] == 200, sent
    return calls.count


async def _quiet() -> None:
    """Everything that can go on has gone on. (As many turns as any answer takes between two tokens, and more.)"""
    for _ in range(20):
        await asyncio.sleep(0)


# --- the wire ------------------------------------------------------------------------------------


def messages() -> dict[str, object]:
    """One of each that travels often."""
    one = request(1, prompt=64, output=64)
    record = GenerationRecord("1" * 32, "chat.completions", 1.75e9, [one], stream=True)
    entries = [TokenEntry(f"{number:032x}-0", 0, 100, [12_345]) for number in range(AT_ONCE)]
    ranks = [RankBeat(rank, 4242, 1_000_000, 30_000_000, True) for rank in range(2)]
    load = GroupLoad(64, 3, 800, 1000, 4096, 99, 64, 0.02, 4000.0)
    beat = GroupBeat("group-0", "stub", 1_795_199_581_807, "ready", ranks, load)
    return {
        "frame of 1 token": TokenFrame("group-0", 1_795_199_581_807, 1_000_000, entries[:1]),
        f"frame of {AT_ONCE} tokens": TokenFrame("group-0", 1_795_199_581_807, 1_000_000, entries),
        "request of 64 prompt tokens": one,
        "dispatch of that request": DispatchBatch([one], 1_795_199_581_807),
        "record of that request": GenerationRecords([record]),
        "heartbeat of two ranks": Heartbeat("executor", "executor-0", 42, "ready", "127.0.0.1:8081", beat),
    }


# --- all of them ---------------------------------------------------------------------------------


def measure() -> dict[str, int]:
    """Every count by its name, whose last word is its unit."""
    works: dict[str, Callable[[], int]] = {
        "executor: 100 decode steps of 1 sequence, calls": lambda: decode_steps(1, 100),
        f"executor: 100 decode steps of {AT_ONCE} sequences, calls": lambda: decode_steps(AT_ONCE, 100),
        f"executor: 100 steps of {AT_ONCE} sequences planned ahead, calls": lambda: steps_ahead(AT_ONCE, 100),
        "executor: 100 requests of 1 token, calls": lambda: whole_requests(100),
        f"gateway: 10 frames of {AT_ONCE} generations, calls": lambda: shared_frames(AT_ONCE, 10),
    }
    for api in APIS:
        for tokens, said in ((1, "1 token"), (101, "101 tokens")):
            for stream, how in ((True, "streamed"), (False, "whole")):
                works[f"gateway: {api} of {said}, {how}, calls"] = partial(answered, tokens, stream=stream, api=api)
    counts = {}
    for name, work in works.items():
        work()  # what is made once and kept is made before
        counts[name] = work()
    return counts | {f"wire: {name}, bytes": len(encode(message)) for name, message in messages().items()}


def most(name: str, recorded: int) -> int:
    """What a count may be."""
    return int(recorded * (1 + ALLOWED[name.split()[-1]]))


def grown(recorded: dict[str, int], found: dict[str, int]) -> list[str]:
    """A sentence for each count that is more than was recorded, and for each that nobody has recorded or made."""
    said = [
        f"{name}: {found[name]:,}, recorded {recorded[name]:,}"
        for name in found
        if name in recorded and found[name] > most(name, recorded[name])
    ]
    said += [f"{name}: not recorded" for name in found if name not in recorded]
    return said + [f"{name}: recorded, and made no more" for name in recorded if name not in found]


def load(path: Path = RECORDED) -> dict[str, int]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, int])


def main(
    record: Annotated[bool, typer.Option("--record", help=f"Write them to {RECORDED.name}.")] = False,
    kernels: Annotated[bool, typer.Option(help="Also count the kernels' instructions, which takes valgrind.")] = True,
) -> None:
    """Operations and bytes of fixed work, against what was recorded; exit code 2 where one has grown."""
    configure_logging("gateway", "counts", level="warning", fmt="json")
    missing = instructions.missing() if kernels else "not asked for"
    if kernels and missing:
        print(f"The kernels' instructions are not counted: {missing}.")
    found, before = measure() | ({} if missing else instructions.count()), load() if RECORDED.is_file() else {}
    apart = ("messages", "instructions") if missing else ("messages",)
    own = {name: count for name, count in before.items() if not name.endswith(apart)}
    rows = [(name, f"{count:,}", f"{own[name]:,}" if name in own else "-") for name, count in found.items()]
    show(Sheet(("count", "now", "recorded"), rows))
    if record:
        kept = {name: count for name, count in before.items() if name.endswith(apart)}
        RECORDED.write_text(json.dumps(found | kept, indent=2) + "\n")
    elif said := grown(own, found):
        print("\n".join(["More work than was recorded (--record accepts it):", *said]))
        raise typer.Exit(2)


if __name__ == "__main__":
    run(main)

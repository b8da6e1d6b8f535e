"""What a ring that leaves gives its peer, and what that is worth: `python -m benchmarks.handover --model DIRECTORY`.

Two groups of a local stack; sessions have two turns each, one group is drained, and every session has another
turn. Once with hand-over and once without:

    moved      blocks and bytes, the time from the first offer to the last answer, and MB/s over all ranks
    hit rate   tokens of the turns after the drain that were found in the cache, of those that might have been
    turn       time of such a turn with an answer of one token, mean: what the client waits for its first token
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import Sheet, machine, run, show
from benchmarks.serve.runner import wait_answered
from benchmarks.serve.sse import Client
from services.cli.commands.control import drain_group
from services.cli.supervision.stack import LocalStack, StackPlan
from services.cli.target import StackSettings

BLOCK = 16
NAME = "model"
FIRST_TOKEN, LAST_TOKEN = 1000, 20_000
READY_SECONDS = 180.0


@dataclass
class Session:
    """Its next prompt is the last one, and something new."""

    name: str
    prompt: list[int] = field(default_factory=list)

    async def turn(self, client: Client, tokens: int) -> tuple[int, int, float]:
        """(tokens found in the cache, tokens that might have been, seconds)."""
        generator = random.Random(f"{self.name}{len(self.prompt)}")
        reusable = len(self.prompt) // BLOCK * BLOCK
        self.prompt += [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]
        body = {"model": NAME, "prompt": self.prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = await client.ask("/v1/completions", body, {"X-Session-ID": self.name})
        seconds = time.perf_counter() - began
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return min(cached, reusable), reusable, seconds


@dataclass
class Figures:
    hit_rate: float
    turn_seconds: float
    given: dict[str, Any]
    """What the leaving ring has logged; empty without a hand-over."""


async def measure(stack: LocalStack, sessions: list[Session], tokens: int) -> Figures:
    """All sessions on a stack of two groups that has just started; one of them leaves."""
    client = Client(stack.gateway_url, timeout=120)
    try:
        first = {"model": NAME, "prompt": [FIRST_TOKEN], "max_tokens": 1}
        await wait_answered(lambda: client.post("/v1/completions", first), 60)
        for _ in range(2):
            for session in sessions:
                await session.turn(client, tokens)
        group = stack.beats[next(c.instance for c in stack.children if c.service == "executor")].group
        assert group is not None
        await drain_group(
            stack.nats_settings, group.group, grace=10, wait=True, timeout=120, report=lambda record: None
        )
        turns = [await session.turn(client, tokens) for session in sessions]
    finally:
        client.close()
    logged = [line for path in stack.logs.glob("executor*.log") for line in path.read_text().splitlines()]
    given = next((json.loads(line) for line in logged if '"handover_sent"' in line), {})
    found, reusable, seconds = zip(*turns, strict=True)
    return Figures(sum(found) / sum(reusable), statistics.mean(seconds), given)


async def measured(model: Path, tp: int, sessions: int, tokens: int, *, handover: bool) -> Figures:
    """On a stack of its own."""
    if not handover:
        os.environ["RYZANSTEIN_HANDOVER_TIMEOUT"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(Path(folder), str(model), NAME, "127.0.0.1", 0, tp, replicas=2, dtype="auto")
        stack = LocalStack(plan, StackSettings())
        try:
            await stack.start()
            async with asyncio.timeout(READY_SECONDS):
                await stack.wait_ready(lambda beats: None)
            return await measure(stack, [Session(f"s{number}") for number in range(sessions)], tokens)
        finally:
            await stack.stop()


def parts(with_it: Figures, without: Figures, tp: int) -> list[Sheet | str]:
    given = with_it.given
    bytes_moved = given.get("bytes_per_rank", 0) * tp
    rate = bytes_moved / given["seconds"] / 1e6 if given.get("seconds") else 0.0
    moved = f"moved: {given.get('blocks', 0)} blocks, {bytes_moved / 1e6:.1f} MB"
    rows = [
        (name, f"{one.hit_rate:.1%}", f"{one.turn_seconds * 1e3:.0f} ms")
        for name, one in (("with hand-over", with_it), ("without", without))
    ]
    said = f"{moved} in {given.get('seconds', 0):.2f} s: {rate:.0f} MB/s"
    return [machine(), said, Sheet(("", "hit rate", "turn"), rows)]


def main(
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    tp: Annotated[int, typer.Option(help="Ranks of each group.")] = 1,
    sessions: Annotated[int, typer.Option(help="Sessions.")] = 16,
    tokens: Annotated[int, typer.Option(help="New tokens of each turn.")] = 400,
) -> None:
    """Prints what a hand-over moves, and what it saves."""
    with_it, without = (
        asyncio.run(measured(model.expanduser(), tp, sessions, tokens, handover=handover))
        for handover in (True, False)
    )
    show(*parts(with_it, without, tp))


if __name__ == "__main__":
    run(main)

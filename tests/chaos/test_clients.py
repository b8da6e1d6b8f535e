"""Clients that read slowly, and clients that go."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.conftest import Loader
from tests.chaos.expected import Task, stub_tasks, stub_text
from tests.chaos.load import CHAT, Load, Record, Wrong
from tests.chaos.streams import Answer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SLOW_CLIENTS = 8
SLOW_BUFFER = 4096
CHUNK = 200  # bytes of a chunk of one token, at least
# Bytes that the gateway may keep for a token that its client has not read: the entry itself, no text of it.
PER_TOKEN = 400


def _slow_tokens() -> int:
    """So many that the kernel cannot take the whole answer: the gateway must wait for its client."""
    send_buffer = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    return max(6000, int(1.5 * send_buffer / CHUNK))


@pytest.mark.chaos
async def test_slow_readers_cost_bounded_memory_and_hold_up_nobody(
    tmp_path: Path, remark: Callable[[str], None]
) -> None:
    tokens = _slow_tokens()
    engine = ["--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", "1"]
    engine += ["--stub-context-length", str(2 * tokens)]
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1, executor_arguments=engine)
    async with House(tmp_path, plan) as house:
        chance = random.Random()
        async with Load(house.addresses, stub_tasks(chance, 100), clients=2) as load:
            await load.flowing()
            await load.settled(time.monotonic())
            before = house.memory("gateway-0")
            faucet = asyncio.Event()
            slow = [
                asyncio.create_task(_read_slowly(house, _long_task(chance, tokens), faucet))
                for _ in range(SLOW_CLIENTS)
            ]
            await house.watch.until(
                lambda: house.work("executor-0") >= SLOW_CLIENTS, 60, "the ring works for all of them"
            )
            grown = []
            sampling = asyncio.create_task(_sample(lambda: house.memory("gateway-0") - before, grown))
            await house.watch.until(
                lambda: house.work("executor-0") < SLOW_CLIENTS // 2, 180, "the ring has produced what they do not read"
            )
            await load.settled(time.monotonic())
            sampling.cancel()
            faucet.set()
            await asyncio.gather(*slow)
            await load.finish()
        load.check()
        stall = max(record.stall() for record in load.records)
        remark(
            f"{SLOW_CLIENTS} clients that did not read, {tokens} tokens each: the gateway grew by "
            f"{max(grown) / 1e6:.1f} MB; the other clients waited for a token for {stall * 1e3:.0f} ms at most."
        )
        assert max(grown) < SLOW_CLIENTS * tokens * PER_TOKEN


def _long_task(chance: random.Random, tokens: int) -> Task:
    task = next(stub_tasks(chance, 1))
    seed = task.body["seed"]
    return Task({**task.body, "max_tokens": tokens}, stub_text(seed, tokens), tokens)


async def _sample(read: Callable[[], int], into: list[int]) -> None:
    while True:
        into.append(read())
        await asyncio.sleep(0.2)


async def _read_slowly(house: House, task: Task, faucet: asyncio.Event) -> None:
    """Reads the first token, then nothing until `faucet` is opened, then all of it."""
    record = Record("slow", task, time.monotonic())
    load = Load(house.addresses, iter([task]))
    body = {**task.body, "stream": True}
    _, address = house.addresses()[0]
    answer = Answer(address, "POST", CHAT, body=body, receive_buffer=SLOW_BUFFER)
    await load.read_events(answer, record, pause=faucet.wait)
    if not record.ended:
        raise Wrong("a slow client's stream has not ended")


async def test_clients_that_go_free_their_places_and_hold_up_nobody(house: House, load: Loader) -> None:
    async with load(house) as clients:
        await clients.flowing()
        gone = set()
        for kind in ("sse", "plain") * 8:
            gone.add(await _go_away(house, kind))
        await clients.settled(time.monotonic())
        await clients.finish()
    clients.check()
    await house.watch.until(
        lambda: all(house.work(name) == 0 for name in ("executor-0", "executor-1")),
        30,
        "the rings have let go of what nobody reads",
    )
    assert len(gone - {""}) == 8, "each of the streams had begun when its client went"


async def _go_away(house: House, kind: str) -> str:
    """Asks for a long answer and leaves, once the first token is there if it is a stream."""
    task = next(stub_tasks(random.Random(), 8000))
    body = {**task.body, "stream": kind == "sse"}
    _, address = random.choice(house.addresses())
    async with Answer(address, "POST", CHAT, body=body) as answer:
        if kind == "plain":
            await asyncio.sleep(random.random() * 0.2)
            return ""
        async for _, data in answer.events():
            return data.decode()
    raise AssertionError("the stream had no event")

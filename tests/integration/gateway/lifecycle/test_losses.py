"""Rings that share a request, flap, or lose their last frame: the text stays whole and nobody decodes on."""

import asyncio
import time
from typing import Any

import httpx
import nats.errors
import openai
import pytest
from nats.aio.msg import Msg

from services.gateway.lifecycle.generations import IDLE_MARGIN, Generations
from shared.config import CommonSettings
from shared.messages import Cancel, GenerationRequest
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, beginning, halting, say, silence, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}


def generations_of(gateway: RunningGateway) -> Generations:
    return gateway.service.work.generations


async def ask(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    return answer.choices[0].message.content or ""


async def test_a_broker_that_confirms_too_late_loses_the_ring_no_request(
    client: openai.AsyncOpenAI, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledge, late = Msg.ack_sync, [nats.errors.TimeoutError()]

    async def slow(message: Msg, timeout: float = 1.0) -> Msg:
        if not late:
            return await acknowledge(message, timeout)
        await ring.bus.client.request(message.reply, timeout=20)  # the server has it, and nobody waits for its word
        raise late.pop()

    monkeypatch.setattr(Msg, "ack_sync", slow)
    assert await ask(client) == "Hello, world!"
    assert not late
    assert len(ring.requests) == 1


async def test_two_rings_with_the_same_attempt_do_not_mix_their_tokens(
    client: openai.AsyncOpenAI, ring: FakeRing, bus: Bus
) -> None:
    rival = FakeRing(bus, group="g2")
    await rival.listen()

    async def both(fake: FakeRing, request: GenerationRequest) -> None:
        await fake.emit(request, 0, [])  # the ring says that it has taken the request
        await rival.emit(request, 0, list(b"XX"))
        await fake.emit(request, 0, list(b"Hel"))
        await rival.emit(request, 2, list(b"XXXXX"))
        await rival.emit(request, 7, [], finish="stop")
        await say(fake, request)

    ring.behave = both
    assert await ask(client) == "Hello, world!"
    await until(lambda: rival.commands)
    assert rival.commands == [Cancel([ring.requests[0].generation_id], 0, 0)]
    assert ring.commands == []


async def test_an_end_that_never_reached_the_journal(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async def forgetful(fake: FakeRing, request: GenerationRequest) -> None:
        if request.attempt:
            await say(fake, request)
            return
        await fake.emit(request, 0, list(b"Hello"))
        await fake.put_record("ready", running=1, at=time.time() + IDLE_MARGIN + 1)
        await until(lambda: gateway_.replays > 1)
        assert len(fake.requests) == 1  # it may be at work on it
        await fake.put_record("ready", at=time.time() + IDLE_MARGIN + 1)

    ring.behave = forgetful
    async with run_gateway(nats_settings, stall_timeout=0.1) as gateway, gateway.openai() as client:
        gateway_ = generations_of(gateway).tokens
        assert await ask(client) == "Hello, world!"
    assert [bytes(request.generated) for request in ring.requests] == [b"", b"Hello"]


@pytest.mark.parametrize("told_by", ["event", "record"])
async def test_a_ring_that_flaps_is_lost_each_time(
    client: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing, told_by: str
) -> None:
    """The same life of a ring is given up, heard again, and given up again."""
    generations = generations_of(gateway)

    async def tell(kind: str, state: str) -> None:
        if told_by == "event":
            await ring.event(kind, at=time.time())
        else:
            await ring.put_record(state, at=time.time())

    async def fall_silent(fake: FakeRing) -> None:
        await until(lambda: generations._by_id[fake.requests[-1].generation_id].tokens)
        await tell("down", "gone")

    ring.behave = halting(fall_silent)
    for turn in (1, 2):
        assert await ask(client) == "Hello, world!"
        assert len(ring.requests) == 2 * turn
        await tell("up", "ready")
        await until(lambda: generations._losses.over_since("g1", 1) is None)


async def test_a_late_frame_of_a_ring_that_is_over(
    client: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing
) -> None:
    generations = generations_of(gateway)

    async def late(fake: FakeRing, request: GenerationRequest) -> None:
        if request.attempt:
            fake.epoch = 2
            await say(fake, request)
            return
        await fake.event("down")
        await until(lambda: generations._losses.over_since("g1", 1) is not None)
        await fake.emit(request, 0, list(b"Hello"))

    ring.behave = late
    assert await ask(client) == "Hello, world!"
    assert bytes(ring.requests[1].generated) == b"Hello"


async def test_a_ring_that_takes_new_work_lives_whatever_is_said_of_it(
    client: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing
) -> None:
    generations = generations_of(gateway)
    await ring.event("down")
    await until(lambda: generations._losses.over_since("g1", 1) is not None)
    assert await ask(client) == "Hello, world!"
    assert len(ring.requests) == 1


async def test_a_superseded_attempt_is_cancelled_in_its_ring(
    client: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing
) -> None:
    """The ring was suspected without a reason: it must not decode on for nobody."""
    ring.behave = halting(lambda fake: fake.event("down"))
    assert await ask(client) == "Hello, world!"
    await until(lambda: generations_of(gateway).cancellations.idle)
    assert ring.commands == [Cancel([ring.requests[0].generation_id], 0, 0)]
    assert not ring.cancelled  # a broadcast would end the attempt that goes on


async def test_cancellations_are_tried_again_when_the_connection_is_back(
    gateway: RunningGateway, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is away for a moment; the queued request beside it is withdrawn all the same."""
    generations = generations_of(gateway)
    asked: list[str] = []
    requester = gateway.service.bus._requester
    real = requester.request

    async def away_at_first(subject: str, *args: Any, **options: Any) -> Any:
        if subject == subjects.control("g1"):
            asked.append(subject)
            if len(asked) == 1:
                subject = "nobody.is.there"
        return await real(subject, *args, **options)

    monkeypatch.setattr(requester, "request", away_at_first)

    ring.behave = beginning(b"Hello")
    async with gateway.http() as http:
        running = asyncio.create_task(http.post(CHAT, json=BODY))
        await until(lambda: [item for item in generations._by_id.values() if item.group])
        await ring.stop()
        queued = asyncio.create_task(http.post(CHAT, json=BODY))
        await until(lambda: [item for item in generations._by_id.values() if item.unheard])
        for task in (running, queued):
            task.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        await until(lambda: len(generations) == 0 and generations.cancellations.idle)
    assert len(asked) == 2
    assert ring.requests[0].generation_id in ring.commanded
    assert (await ring.bus.jetstream().stream_info("INTAKE")).state.messages == 0


async def test_requests_that_wait_in_the_queue_cause_no_replays(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = silence
    async with run_gateway(nats_settings, stall_timeout=0.05) as gateway, gateway.http() as http:
        generations = generations_of(gateway)
        waiting = asyncio.create_task(http.post(CHAT, json=BODY | {"n": 8}))
        await until(lambda: len(ring.requests) == 8)
        for later in range(10):
            generations._sweep(time.monotonic() + later)
        assert not generations.tokens._wanted.is_set()
        await ring.emit(ring.requests[0], 0, [])
        await until(lambda: [item for item in generations._by_id.values() if item.group])
        await until(lambda: generations.tokens.replays > 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_one_replay_serves_all_that_have_stalled(
    gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    ring.behave = beginning(b"")
    generations = generations_of(gateway)
    waiting = asyncio.create_task(http.post(CHAT, json=BODY | {"n": 8}))
    await until(lambda: sum(bool(item.group) for item in generations._by_id.values()) == 8)
    stall, now = gateway.service.settings.stall_timeout, time.monotonic()
    requested: list[float] = []
    generations.tokens.request_replay = lambda: requested.append(at)  # type: ignore[method-assign]
    for step in range(60):
        at = now + step * stall / 10
        generations._sweep(at)
    assert [round((at - now) / stall) for at in requested] == [1, 2, 3, 4, 5]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

"""Streams stay whole: lost frames, lost rings, clients that go, a gateway that stops."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest, GroupRecord, ModelCard
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import (
    MODEL,
    FakeRing,
    beginning,
    failing,
    halting,
    say,
    saying,
    silence,
    until,
)

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}
LONG = "".join(f"<{number}>" for number in range(400))


async def test_frames_dropped_by_the_client_library_are_filled_from_the_journal(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    async def burst(fake: FakeRing, request: GenerationRequest) -> None:
        """Far more frames in one packet than may wait."""
        for position, token in enumerate(LONG.encode()):
            await fake.emit(request, position, [token])
        await fake.emit(request, len(LONG), [], finish="stop")

    ring.behave = burst
    async with run_gateway(nats_settings, pending_frames=2) as gateway, gateway.openai() as client:
        answers = await asyncio.gather(*(client.chat.completions.create(model=MODEL, messages=HELLO) for _ in range(3)))
        assert {answer.choices[0].message.content for answer in answers} == {LONG}
        assert gateway.service.work.generations.tokens.replays > 0


async def test_a_missed_end_is_found_when_the_stream_stalls(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, stall_timeout=0.2) as gateway, gateway.http() as http:
        generations = gateway.service.work.generations
        live = generations.tokens._on_frame

        def deaf(frame: Any) -> None:
            """The first frame comes, nothing after it."""
            live(frame)
            generations.tokens._on_frame = lambda _: None

        generations.tokens._on_frame = deaf
        answer = await http.post(CHAT, json=BODY)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
        assert generations.tokens.replays > 0


async def test_a_lost_group_is_survived_in_mid_stream(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = beginning(b"Hello")
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, seed=5, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "Hello" and len(ring.requests) == 1:
            await ring.die()
            ring.behave = say
            ring.resume()
    assert text == "Hello, world!"
    first, second = ring.requests
    assert (second.attempt, bytes(second.generated), second.lane) == (1, b"Hello", "recovery")
    assert (second.generation_id, second.sampling, second.prompt) == (first.generation_id, first.sampling, first.prompt)


async def test_frames_of_a_dead_attempt_do_no_harm(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def ghost(fake: FakeRing, request: GenerationRequest) -> None:
        if not request.attempt:
            await fake.emit(request, 0, list(b"Hel"))
            await fake.emit(request, 3, [], finish="error", error=("ring_lost", "A rank died.", True))
            return
        old = ring.requests[0]
        await fake.emit(old, 3, list(b"XXX"))
        await fake.emit(old, 6, [], finish="stop")
        await say(fake, request)

    ring.behave = ghost
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world!"


async def test_a_ring_that_died_before_its_first_token(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = silence
    waiting = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
    await until(lambda: ring.requests)
    await ring.die()
    ring.behave = say
    ring.resume()
    assert (await waiting).choices[0].message.content == "Hello, world!"
    assert ring.requests[-1].attempt == 1


async def test_a_request_in_the_queue_is_not_handed_in_twice(
    gateway: RunningGateway, client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    await ring.stop()
    waiting = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
    generations = gateway.service.work.generations
    await until(lambda: [item for item in generations._by_id.values() if item.state == "queued"])
    suspect = next(iter(generations._by_id.values()))
    generations.on_group_lost("g1", 1, MODEL)
    await generations.suspects.check([suspect])
    assert suspect.stream.attempt == 0
    ring.epoch = 2
    ring.resume()
    assert (await waiting).choices[0].message.content == "Hello, world!"
    assert len(ring.requests) == 1


async def test_a_record_of_a_new_epoch_tells_of_a_loss_too(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def renew(fake: FakeRing) -> None:
        fake.epoch += 1
        await fake.put_record("ready")

    ring.behave = halting(renew)
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world!"


async def test_the_budget_of_attempts_is_bounded(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = failing("ring_lost", "A rank died.", retryable=True)
    answer = await http.post(CHAT, json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ring_lost"
    assert len(ring.requests) == 4


async def test_a_client_that_goes_cancels_its_generation(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async def start(fake: FakeRing, request: GenerationRequest) -> None:
        if bytes(request.prompt) != b"quiet\n":
            await fake.emit(request, 0, list(b"Hello"))

    ring.behave = start
    async with run_gateway(nats_settings, resume_grace=0.1) as gateway:
        async with gateway.http() as http:
            async with http.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
                async for _ in answer.aiter_bytes():
                    break
            await until(lambda: ring.requests[0].generation_id in ring.commanded)
            assert not ring.cancelled  # its group was known
            quiet = BODY | {"messages": [{"role": "user", "content": "quiet"}]}
            with pytest.raises(httpx.ReadTimeout):
                await http.post(CHAT, json=quiet, timeout=0.2)
            await until(lambda: len(ring.requests) == 2)
            await until(lambda: ring.requests[1].generation_id in ring.cancelled)
            assert ring.requests[1].generation_id not in ring.commanded
        generations = gateway.service.work.generations
        await until(lambda: len(generations) == 0)


async def test_a_queued_request_of_a_client_that_went_is_withdrawn(gateway: RunningGateway, ring: FakeRing) -> None:
    await ring.stop()
    async with gateway.http() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(CHAT, json=BODY, timeout=0.2)
    generations = gateway.service.work.generations
    await until(lambda: len(generations) == 0 and generations.cancellations.idle)
    info = await ring.bus.jetstream().stream_info("INTAKE")
    assert info.state.messages == 0


async def test_streams_that_outlast_the_grace_are_told(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = beginning(b"He")
    async with run_gateway(nats_settings, drain_timeout=0.1) as gateway, gateway.openai() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        gateway.service.end()
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        await gateway.task
    assert ring.requests[0].generation_id not in ring.commanded  # others go on with it


async def test_frames_missed_while_disconnected_are_filled_from_the_journal(
    gateway: RunningGateway, client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    nats_client = gateway.service.bus.client
    lost = asyncio.Event()
    gateway.service.bus.on_reconnect(lost.set)

    async def behave(fake: FakeRing, request: GenerationRequest) -> None:
        await fake.emit(request, 0, list(b"Hello"))
        await fake.bus.flush()
        nats_client._transport.close()  # as if the network had cut it
        for position, token in enumerate(b", world!", 5):
            await fake.emit(request, position, [token])
        await fake.bus.flush()
        await lost.wait()
        await fake.emit(request, 13, [], finish="stop")

    ring.behave = behave
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world!"
    assert gateway.service.work.generations.tokens.replays > 0


async def test_a_deleted_group_is_a_lost_one_and_a_deleted_model_is_unknown(
    http: httpx.AsyncClient, ring: FakeRing
) -> None:
    groups = await Bucket.open(ring.bus, subjects.GROUPS_BUCKET, GroupRecord)
    models = await Bucket.open(ring.bus, subjects.MODELS_BUCKET, ModelCard)
    await ring.put_record("ready")
    ring.behave = halting(lambda fake: groups.delete(fake.group))
    answer = await http.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
    await models.delete(MODEL)
    while (await http.get(f"/v1/models/{MODEL}")).status_code != 404:
        pass
    assert "none yet" in (await http.post(CHAT, json=BODY)).json()["error"]["message"]


async def test_a_slow_reader_gets_everything(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = saying("x" * 2000)
    body = BODY | {"stream": True}
    async with gateway.http() as http, http.stream("POST", CHAT, json=body) as answer:
        await until(lambda: ring.answered)
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "x" * 2000
    assert lines[-1] == "data: [DONE]"

"""A client that lost its connection goes on at any gateway, from where it stood."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from shared.config import CommonSettings
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, saying, silence, until
from tests.integration.gateway.resuming import (
    Event,
    Paced,
    finishes,
    public_id,
    read_events,
    resumed,
    streamed,
    text_of,
)

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
STREAM: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": True, "seed": 7}
TEXT = b"The log is the thing, and a connection is a cursor."


async def begin(
    gateway: RunningGateway, characters: int | None, body: dict[str, Any] = STREAM, path: str = CHAT
) -> list[Event]:
    """The first events of a stream, with so many characters; then the client goes."""
    async with gateway.http() as http:
        return await streamed(http, path, body, characters)


async def go_on(gateway: RunningGateway, identity: str, last: str) -> list[Event]:
    async with gateway.http() as http:
        return await resumed(http, identity, last)


async def test_a_stream_goes_on_at_another_gateway_while_it_runs(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    first = await begin(gateway, 5)
    reading = asyncio.create_task(go_on(other, public_id(first), first[-1][1]))
    answers = gateway.service.work.answers
    await until(lambda: any(answer.listened_until for answer in answers.all()))
    paced.allow()
    rest = await reading
    assert text_of(first) + text_of(rest) == TEXT.decode()
    assert len(ring.requests) == 1
    assert not ring.commanded


async def test_a_finished_generation_is_replayed_from_every_position(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = saying(TEXT.decode())
    whole = await begin(gateway, None)
    identity = public_id(whole)
    assert text_of(whole) == TEXT.decode()
    assert text_of(await go_on(other, identity, "")) == TEXT.decode()
    for index in range(len(whole) - 1):
        rest = await go_on(other, identity, whole[index][1])
        assert text_of(whole[: index + 1]) + text_of(rest) == TEXT.decode()
        assert finishes(whole[: index + 1]) + finishes(rest) == ["stop"]
    end = await go_on(other, identity, whole[-2][1])
    assert end == [("[DONE]", "")]


@pytest.mark.parametrize("cut", range(2, 12))
async def test_stop_strings_and_positions_within_them(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, cut: int
) -> None:
    """The text that is held back at the cut is neither lost nor shown twice."""
    ring.behave = saying("ab, an, anx")
    body = {"model": MODEL, "prompt": "x", "stream": True, "stop": "anx", "stream_options": {"include_usage": True}}
    whole = await begin(gateway, None, body, "/v1/completions")
    assert text_of(whole) == "ab, an, "
    first = whole[:cut]
    if first[-1][1]:
        rest = await go_on(other, public_id(first), first[-1][1])
        assert text_of(first) + text_of(rest) == "ab, an, "
        assert finishes(first) + finishes(rest) == ["stop"]


async def test_the_state_of_a_generation(gateway: RunningGateway, other: RunningGateway, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    first = await begin(gateway, 5)
    path = f"/v1/generations/{public_id(first)}"
    async with other.http() as http:
        state = (await http.get(path)).json()
        assert (state["object"], state["status"], state["model"]) == ("generation", "in_progress", MODEL)
        text = state["response"]["choices"][0]["message"]["content"]
        assert TEXT.decode().startswith(text)
        assert state["response"]["choices"][0]["finish_reason"] is None
        paced.allow()
        rest = await go_on(gateway, public_id(first), state["position"])
        assert text + text_of(rest) == TEXT.decode()
        while (state := (await http.get(path)).json())["status"] != "completed":
            pass
        assert state["response"]["choices"][0]["message"]["content"] == TEXT.decode()
        assert state["response"]["usage"]["completion_tokens"] == len(TEXT)


async def test_nobody_comes_back(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = Paced(TEXT, 10)
    async with run_gateway(nats_settings, resume_grace=0.3) as gateway:
        first = await begin(gateway, 5)
        await until(lambda: ring.requests[0].generation_id in ring.commanded)
        async with gateway.http() as http:
            state = (await http.get(f"/v1/generations/{public_id(first)}")).json()
        assert state["status"] == "cancelled"
        assert "cancelled" in state["error"]["message"]


async def test_background_outlives_the_grace_and_its_stop_string_ends_it(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    async with run_gateway(nats_settings, resume_grace=0.0) as gateway, gateway.http() as http:
        headers = {"X-Ryzanstein-Background": "60"}
        body = STREAM | {"stop": "thing"}
        async with http.stream("POST", CHAT, json=body, headers=headers) as response:
            first = await read_events(response, 3)
        answers = gateway.service.work.answers
        await until(lambda: [answer for answer in answers.all() if not answer.readers])
        paced.allow(25)
        await until(lambda: ring.requests[0].generation_id in ring.commanded)  # the stop string was found
        state = (await http.get(f"/v1/generations/{public_id(first)}")).json()
        assert state["status"] == "completed"
        assert state["response"]["choices"][0]["message"]["content"] == "The log is the "


async def test_a_client_that_left_before_the_first_token_frees_its_place_at_once(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    """It has no position to come back to, unless a key leads there."""
    ring.behave = silence
    key = {"Idempotency-Key": "k"}
    async with run_gateway(nats_settings, resume_grace=3600.0) as gateway, gateway.http() as http:
        asked = [asyncio.create_task(http.post(CHAT, json=STREAM, headers=headers)) for headers in (key, {})]
        await until(lambda: len(ring.requests) == 2)
        for task in asked:
            task.cancel()
        await until(lambda: ring.cancelled)
        answers = gateway.service.work.answers
        (kept,) = [answer for answer in answers.all() if not answer.ended]
        assert kept.record.idempotency
        assert ring.cancelled == {item.generation_id for item in ring.requests} - {f"{kept.identity}-0"}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}, {"X-Ryzanstein-Background": "3600"}])
async def test_a_client_that_left_keeps_its_place_while_nobody_waits_for_it_or_if_it_said_so(
    nats_settings: CommonSettings, ring: FakeRing, headers: dict[str, str]
) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    async with run_gateway(nats_settings, resume_grace=3600.0) as gateway, gateway.http() as http:
        answers, catalog = gateway.service.work.answers, gateway.service.work.catalog
        await ring.put_record("busy", running=1)
        async with http.stream("POST", CHAT, json=STREAM, headers=headers) as response:
            first = await read_events(response, 5)
        await until(lambda: all(answer.left for answer in answers.all()))
        answers._sweep(time.monotonic())
        assert not answers._giving_up
        await ring.put_record("busy", running=1, waiting=1)
        await until(lambda: catalog.has_waiting("g1", 1))
        answers._sweep(time.monotonic())
        if headers:
            assert not answers._giving_up
            paced.allow()
            rest = await go_on(gateway, public_id(first), first[-1][1])
            assert text_of(first) + text_of(rest) == TEXT.decode()
        else:
            await until(lambda: ring.requests[0].generation_id in ring.commanded)


async def test_delete_ends_a_generation_for_its_readers(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    async def cancelled(fake: FakeRing, request: Any) -> None:
        await fake.emit(request, 0, list(b"Hello"))
        await until(lambda: request.generation_id in fake.commanded)
        await fake.emit(request, 5, [], finish="cancelled")

    ring.behave = cancelled
    for deleting in (gateway, other):
        async with gateway.http() as http, http.stream("POST", CHAT, json=STREAM) as response:
            lines = response.aiter_lines()
            first = await anext(line async for line in lines if line.startswith("data: "))
            identity = public_id([(first.removeprefix("data: "), "")])
            async with deleting.http() as deleter:
                answer = await deleter.delete(f"/v1/generations/{identity}")
                assert answer.json() == {"id": identity, "object": "generation", "cancelled": True}
            assert "was cancelled" in "".join([line async for line in lines])
        async with deleting.http() as deleter:
            again = True
            while again:  # until its end has come to this gateway
                again = (await deleter.delete(f"/v1/generations/{identity}")).json()["cancelled"]


@pytest.mark.parametrize("how", ["GET", "DELETE", "stream"])
@pytest.mark.parametrize("identity", ["chatcmpl-1", "x" * 5000, "chatcmpl-" + "0" * 32, "cmpl-%00", "..%2F"])
async def test_unknown_generations(http: httpx.AsyncClient, how: str, identity: str) -> None:
    path = f"/v1/generations/{identity}" + ("/stream" if how == "stream" else "")
    answer = await http.request("GET" if how == "stream" else how, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("generation_not_found", "unknown_url")


async def test_positions_that_do_not_fit(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = say
    whole = await begin(gateway, None)
    for last in ("x", "-1", "1,2", "99999999999999999999", "4000000000", "1" * 4000, "1,", "\u0661"):
        async with gateway.http() as http:
            answer = await http.get(
                f"/v1/generations/{public_id(whole)}/stream", headers={"Last-Event-ID": last.encode()}
            )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_position"


async def test_readers_are_bounded(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = Paced(TEXT, 10)
    async with (
        run_gateway(nats_settings, max_readers=1) as gateway,
        gateway.http() as http,
        http.stream("POST", CHAT, json=STREAM),
    ):
        answers = gateway.service.work.answers
        (answer,) = answers.all()
        refused = await http.get(f"/v1/generations/{answer.public_id}/stream")
        assert refused.status_code == 429
        assert "readers" in refused.json()["error"]["message"]

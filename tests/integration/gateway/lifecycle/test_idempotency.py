"""A repeated request reads what the first one generates, wherever it arrives."""

import asyncio
import time
from typing import Any

import openai
import pytest

from services.gateway.lifecycle.idempotency import IdempotencyKeys
from shared.config import CommonSettings
from shared.messages.records import GenerationRecord, Idempotency
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, say, until
from tests.integration.gateway.resuming import Paced, streamed, text_of

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}
KEY = {"Idempotency-Key": "order-66"}
TEXT = b"Only once is it paid for."


async def test_a_repeat_returns_the_finished_one_on_any_gateway(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    answers = []
    for each in (gateway, gateway, other):
        async with each.http() as http:
            answers.append((await http.post(CHAT, json=BODY, headers=KEY)).json())
    assert answers[0] == answers[1] == answers[2]
    assert len(ring.requests) == 1
    async with other.http() as http:
        metrics = (await http.get("/metrics")).text
    assert 'ryzanstein_gateway_attached_total{how="idempotency"} 1.0' in metrics
    assert "ryzanstein_gateway_generations_followed_total 1.0" in metrics


async def test_a_repeat_attaches_to_the_running_one(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 5)
    async with gateway.http() as http, other.http() as elsewhere:
        posts = [asyncio.create_task(client.post(CHAT, json=BODY, headers=KEY)) for client in (http, elsewhere, http)]
        await until(lambda: ring.requests)
        paced.allow()
        answers = [(await post).json() for post in posts]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["choices"][0]["message"]["content"] == TEXT.decode()
    assert len(ring.requests) == 1


async def test_a_log_that_takes_long_to_read_is_not_forgotten_meanwhile(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens to what is only being found, for longer than it would be kept."""
    ring.behave = paced = Paced(TEXT, 5)
    answers = other.service.work.answers
    read_sources = answers.read_sources

    async def slowly(*given: Any) -> None:
        answers._sweep(time.monotonic() + 3600)
        await read_sources(*given)

    monkeypatch.setattr(answers, "read_sources", slowly)
    async with gateway.http() as http, other.http() as elsewhere:
        posts = [asyncio.create_task(http.post(CHAT, json=BODY, headers=KEY))]
        await until(lambda: ring.requests)
        posts.append(asyncio.create_task(elsewhere.post(CHAT, json=BODY, headers=KEY)))
        await until(lambda: [answer for answer in answers.all() if answer.readers])
        paced.allow()
        first, second = [(await post).json() for post in posts]
    assert first == second


async def test_duplicates_race_over_two_gateways(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    async with gateway.http() as http, other.http() as elsewhere:
        for number in range(5):
            headers = {"Idempotency-Key": f"race-{number}"}
            posts = (client.post(CHAT, json=BODY, headers=headers) for client in (http, elsewhere) * 4)
            answers = [answer.json() for answer in await asyncio.gather(*posts)]
            assert all(answer == answers[0] for answer in answers), answers
            assert answers[0]["choices"][0]["message"]["content"] == "Hello, world!"
            assert len(ring.requests) == number + 1


async def test_a_repeated_stream_goes_on_behind_its_last_event(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    body = BODY | {"stream": True}
    async with gateway.http() as http, other.http() as elsewhere:
        first = await streamed(http, CHAT, body, 5, headers=KEY)
        paced.allow()
        rest = await streamed(elsewhere, CHAT, body, headers=KEY | {"Last-Event-ID": first[-1][1]})
        assert text_of(first) + text_of(rest) == TEXT.decode()
        assert text_of(await streamed(elsewhere, CHAT, body, headers=KEY)) == TEXT.decode()
    assert len(ring.requests) == 1


async def test_the_openai_client_sends_its_key(other: RunningGateway, ring: FakeRing) -> None:
    async with other.openai() as client:
        texts = {
            (await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=KEY)).id for _ in range(2)
        }
        assert len(texts) == 1
        with pytest.raises(openai.UnprocessableEntityError, match="another request body"):
            await client.chat.completions.create(model=MODEL, messages=HELLO, seed=1, extra_headers=KEY)
    assert len(ring.requests) == 1


async def test_endpoints_do_not_share_keys(gateway: RunningGateway, ring: FakeRing) -> None:
    async with gateway.http() as http:
        ids = set()
        ids.add((await http.post(CHAT, json=BODY, headers=KEY)).json()["id"])
        prompt = {"model": MODEL, "prompt": "x"}
        ids.add((await http.post("/v1/completions", json=prompt, headers=KEY)).json()["id"])
    assert len(ids) == len(ring.requests) == 2


async def test_a_failed_request_frees_its_key(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, max_generations=1) as gateway, gateway.http() as http:
        refused = await http.post(CHAT, json=BODY | {"temperature": 9}, headers=KEY)
        assert refused.status_code == 400
        ring.behave = failing("invalid_request", "No.")
        assert (await http.post(CHAT, json=BODY, headers=KEY)).status_code == 400
        full = await http.post(CHAT, json=BODY | {"n": 2}, headers={"Idempotency-Key": "full"})
        assert full.status_code == 429
        ring.behave = say
        keys = await Bucket.open(ring.bus, subjects.IDEMPOTENCY_BUCKET, Idempotency)
        while await keys.items():
            pass
        assert (await http.post(CHAT, json=BODY, headers=KEY)).status_code == 200
        answer = await http.post(CHAT, json=BODY, headers={"Idempotency-Key": "full"})
        assert answer.status_code == 200  # another body: the key was freed


@pytest.mark.slow
async def test_a_key_whose_gateway_died_before_it_wrote_the_record(gateway: RunningGateway, ring: FakeRing) -> None:
    from services.gateway.lifecycle.idempotency import entry_name, fingerprint
    from services.gateway.lifecycle.request_state import new_identity

    async with gateway.http() as http:
        sent = http.build_request("POST", CHAT, json=BODY, headers=KEY)
        keys = await Bucket.open(ring.bus, subjects.IDEMPOTENCY_BUCKET, Idempotency)
        entry = Idempotency(new_identity("00000000", 1e9), fingerprint(sent.content), 1e9)
        await keys.put(entry_name("", "chat.completions", "order-66"), entry)
        assert (await http.send(sent)).status_code == 200


async def test_headers_that_are_wrong(gateway: RunningGateway) -> None:
    for headers, status, code in [
        ({"Idempotency-Key": ""}, 400, "invalid_header"),
        ({"Idempotency-Key": "x" * 256}, 400, "invalid_header"),
        ({"Last-Event-ID": "3"}, 400, "invalid_header"),
        ({"Last-Event-ID": "3", "Idempotency-Key": "new"}, 404, "generation_not_found"),
        ({"X-Ryzanstein-Background": "soon"}, 400, "invalid_header"),
        ({"X-Ryzanstein-Background": "0"}, 400, "invalid_header"),
        ({"X-Ryzanstein-Background": "999999999"}, 400, "invalid_header"),
        ({"X-Ryzanstein-Background": "nan"}, 400, "invalid_header"),
    ]:
        async with gateway.http() as http:
            answer = await http.post(CHAT, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_generation_that_a_stop_string_ended_is_a_finished_one(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    """Its ring was told to end it, and the log says so."""

    async def until_cancelled(fake: FakeRing, request: Any) -> None:
        await fake.emit(request, 0, list(b"Hello, world! And so on."))
        await until(lambda: request.generation_id in fake.commanded)
        await fake.emit(request, 24, [], finish="cancelled")

    ring.behave = until_cancelled
    answers = []
    for each in (gateway, gateway, other):
        async with each.http() as http:
            answers.append((await http.post(CHAT, json=BODY | {"stop": "!"}, headers=KEY)).json())
        await until(lambda: ring.answered)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["choices"][0]["message"]["content"] == "Hello, world"
    assert len(ring.requests) == 1


async def test_a_key_that_cannot_be_freed_is_left_to_the_next_repeat(bus: Bus) -> None:
    """A refused request frees its key in the background: the broker that was gone may be gone for that too."""
    keys = IdempotencyKeys(bus, 60.0)
    await keys.bucket.ensure()
    await bus.close()
    await keys.free(GenerationRecord("f" * 32, "chat.completions", 0.0, [], idempotency="key"))

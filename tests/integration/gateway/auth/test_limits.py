"""Limits of keys and tenants that two gateways keep together on a real NATS, as OpenAI's client sees them."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from services.gateway.auth.authenticator import Principal
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.record import Context
from services.gateway.ratelimit.limiter import Limiter
from shared.config import CommonSettings
from shared.keys import KeyLimits, KeyRecord, NewKey, new_key
from shared.messages.records import Spent
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence, until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


async def make(bus: Bus, tenant: str = "acme", **limits: int) -> NewKey:
    key = new_key(tenant, 0.0, limits=KeyLimits(**limits))
    keys = await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord)
    await keys.put(key.identity, key.record)
    return key


def bearer(key: NewKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.token}"}


async def ask(gateway: RunningGateway, key: NewKey | None, body: dict[str, Any] = BODY) -> httpx.Response:
    async with gateway.http(headers=bearer(key) if key else {}) as http:
        return await http.post(CHAT, json=body)


async def test_two_gateways_let_no_more_through_than_the_limit(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    key, other = await make(bus, requests_per_minute=10), await make(bus)
    async with run_gateway(nats_settings) as one, run_gateway(nats_settings) as two:
        async with one.http(headers=bearer(key)) as first, two.http(headers=bearer(key)) as second:
            floods = (http.post(CHAT, json=BODY) for http in (first, second) for _ in range(15))
            answers = await asyncio.gather(*floods)
        assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 20}
        assert len(ring.requests) == 10
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
        assert "(RPM): Limit 10, Used 10, Requested 1. Please try again in" in error["message"]
        assert 55 <= int(refused.headers["retry-after"]) <= 62
        assert refused.headers["x-ratelimit-limit-requests"] == "10"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].startswith(("5", "1m"))
        free = await ask(one, other)
        assert free.status_code == 200
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]
        malformed = await ask(one, other, BODY | {"max_tokens": -1})
        assert malformed.status_code == 400


async def test_openais_client_reads_the_headers_and_waits_as_told(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    key = await make(bus, requests_per_minute=2, tokens_per_minute=1000)
    async with (
        run_gateway(nats_settings) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key.token, max_retries=0) as client,
    ):
        prompt = 0
        for remaining in (1, 0):
            raw = await client.chat.completions.with_raw_response.create(**BODY, stream=remaining == 0)
            assert raw.headers["x-ratelimit-remaining-requests"] == str(remaining)
            assert raw.headers["x-ratelimit-limit-tokens"] == "1000"
            spent = 1000 - int(raw.headers["x-ratelimit-remaining-tokens"])
            answer = raw.parse()
            if not prompt:
                prompt = answer.usage.prompt_tokens
                assert spent == prompt + 5
            else:
                assert spent == 2 * (prompt + 5)
                async for _ in answer:
                    pass
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**BODY)
        assert refused.value.code == "rate_limit_exceeded"


async def test_tokens_are_reserved_and_what_was_not_used_goes_back(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    """The stub's answer has 13 tokens, whatever was reserved; its prompt, about as many as it has letters."""
    key = await make(bus, tokens_per_minute=1000)
    async with run_gateway(nats_settings) as one, run_gateway(nats_settings) as two:
        large = await ask(one, key, BODY | {"max_tokens": 1500})
        assert large.status_code == 429
        assert "Request too large" in large.json()["error"]["message"]
        assert "retry-after" not in large.headers
        usage = (await ask(one, key, BODY | {"max_tokens": 900})).json()["usage"]
        assert usage["completion_tokens"] == 13
        windows = await Bucket.open(bus, subjects.LIMITS_BUCKET, Spent)

        async def spent() -> int:
            entry = await windows.get(f"key/{key.identity}/tokens")
            return sum(entry.value.slots) if entry else 0

        while await spent() != usage["total_tokens"]:
            pass
        assert (await ask(two, key, BODY | {"max_tokens": 900})).status_code == 200


async def test_a_tenants_keys_share_its_limit_and_others_do_not(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    first, second, stranger = await make(bus), await make(bus), await make(bus, "other")
    async with run_gateway(nats_settings, tenant_requests_per_minute=3) as gateway:
        codes = [(await ask(gateway, key)).status_code for key in (first, second, first, second, stranger)]
    assert codes == [200, 200, 200, 429, 200]


async def test_without_keys_the_settings_hold_for_all_together(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, requests_per_minute=2) as gateway:
        assert [(await ask(gateway, None)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_repeat_under_an_idempotency_key_counts_once_and_a_refused_one_frees_its_key(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    key = await make(bus, requests_per_minute=3, tokens_per_minute=2000)
    async with run_gateway(nats_settings) as gateway, gateway.http(headers=bearer(key)) as http:
        same = {"Idempotency-Key": "a"}
        ids = {(await http.post(CHAT, json=BODY, headers=same)).json()["id"] for _ in range(4)}
        assert len(ids) == 1
        free = {"Idempotency-Key": "b"}
        refused = await http.post(CHAT, json=BODY | {"max_tokens": 2030}, headers=free)
        assert refused.status_code == 429
        while (again := await http.post(CHAT, json=BODY, headers=free)).status_code == 422:
            pass  # its entry is deleted in the background
        assert again.status_code == 200
        assert len(ring.requests) == 2
        assert (await http.post(CHAT, json=BODY)).status_code == 429


async def test_generations_at_once_are_bounded_here_exactly_and_elsewhere_within_moments(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    ring.behave = silence
    key = await make(bus, concurrent=2)
    async with run_gateway(nats_settings, resume_grace=0.0) as one, run_gateway(nats_settings) as two:
        async with connect(one.websocket_url, additional_headers=bearer(key)) as socket:
            for name in "abc":
                await socket.send(json.dumps({"type": "generate", "id": name, "request": BODY}))
            answer = json.loads(await socket.recv())
            assert (answer["type"], answer["error"]["code"]) == ("error", "rate_limit_exceeded")
            assert "concurrent requests: Limit 2, Used 2" in answer["error"]["message"]
            await until(lambda: len(ring.requests) == 2)
            limiter = two.service.work.limiter
            await until(lambda: limiter.counts._elsewhere)
            assert (await ask(two, key)).status_code == 429
        await until(lambda: not limiter.counts._elsewhere)
        ring.behave = FakeRing(bus).behave
        assert (await ask(two, key)).status_code == 200


async def test_lines_of_a_batch_take_tokens_alone_and_wait_for_them(nats_settings: CommonSettings, bus: Bus) -> None:
    limiter = Limiter(bus, "g", GatewaySettings(**nats_settings.model_dump()))
    await limiter.start()
    owner = Principal("k", "acme", KeyLimits(requests_per_minute=1, tokens_per_minute=100, concurrent=1))
    lines = [limiter.admission(owner, "batch", Context("r").answer_headers) for _ in range(3)]
    for line in lines:
        await line.request()
    first, second, third = lines
    assert first
    assert second
    assert third
    await first.begin(60)
    waiting = asyncio.create_task(second.begin(60))
    await until(lambda: limiter.windows.account("key/k/tokens", 100)._shut_until)
    first.end(10)
    await asyncio.wait_for(waiting, 20)
    interactive = limiter.admission(owner, "interactive", {})
    await interactive.begin(30)
    second.end(60)
    interactive.end(0)
    third.end(0)


async def test_a_prompt_may_have_so_many_tokens_and_a_generation_take_so_long(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    async with run_gateway(nats_settings, prompt_limit=40, request_timeout=0.3) as gateway:
        long = await ask(gateway, None, BODY | {"messages": [{"role": "user", "content": "Hi" * 40}]})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "at most 40 tokens" in long.json()["error"]["message"]
        assert (await ask(gateway, None)).status_code == 200
        ring.behave = silence
        late = await ask(gateway, None)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "longer than 0.3 s" in late.json()["error"]["message"]
        await until(lambda: len(ring.cancelled | ring.commanded) == 1)

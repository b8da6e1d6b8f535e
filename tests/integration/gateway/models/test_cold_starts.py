"""Requests for registered models that were never loaded: held, asked for, answered, or told why not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

import httpx
import openai
import pytest
from openai.types import Batch

from shared.config import CommonSettings
from shared.errors import NoGroupAvailable
from shared.messages import HostModel
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import FakeRing, stub_card, until

CHAT = "/v1/chat/completions"


def chat(model: str = "cold", **more: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}


def held(gateway: RunningGateway) -> int:
    return sum(one.requests for one in gateway.service.work._cold_starts._models.values())


@pytest.fixture
async def cold(hosts: FakeHosts, gateway: RunningGateway) -> FakeHosts:
    """With a model that nobody has loaded."""
    await hosts.register("cold", aliases=["gpt-4"])
    await until(lambda: "cold" in gateway.service.work.catalog.registry.specs)
    return hosts


async def test_a_request_waits_until_the_model_is_there_under_its_name_or_an_alias(
    cold: FakeHosts, gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    bodies = [(CHAT, chat()), (CHAT, chat("gpt-4", stream=True))]
    bodies += [("/v1/completions", {"model": "cold", "prompt": "Hi"})]
    bodies += [("/v1/responses", {"model": "gpt-4", "input": "Hi", "truncation": "auto"})]
    answers = [asyncio.create_task(http.post(path, json=body)) for path, body in bodies]
    await until(lambda: cold.waiting("cold") == 4)
    assert held(gateway) == 4
    refused = await http.post("/v1/chat/completions", json=chat(max_tokens=-1))
    assert refused.status_code == 400, "what is wrong is told at once"
    tokens = await http.post("/tokenize", json={"model": "cold", "prompt": "Hi"})
    assert (tokens.status_code, tokens.json()["error"]["code"]) == (503, "model_not_loaded")
    await ring.add_model(stub_card("cold"))
    for answer in await asyncio.gather(*answers):
        assert answer.status_code == 200, answer.text
    assert answers[0].result().json()["model"] == "cold"
    assert '"model":"cold"' in answers[1].result().text
    assert {request.model for request in ring.requests} == {"cold"}
    await until(lambda: cold.waiting("cold") == 0)
    assert held(gateway) == 0


async def test_a_model_of_which_the_gateway_has_not_heard_yet_is_looked_up(
    cold: FakeHosts, gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    registry = gateway.service.work.catalog.registry
    revision = registry.revisions["cold"]
    registry.spec_changed("cold", None, 0)  # as before the news of it
    waiting = asyncio.create_task(http.post(CHAT, json=chat()))
    await until(lambda: cold.waiting("cold") == 1)
    assert registry.revisions["cold"] == revision
    await ring.add_model(stub_card("cold"))
    assert (await waiting).status_code == 200
    unknown = await http.post(CHAT, json=chat("nobody's"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_embeddings_wait_too(cold: FakeHosts, http: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = asyncio.create_task(http.post("/v1/embeddings", json={"model": "cold", "input": "Hi"}))
    await until(lambda: cold.waiting("cold") == 1)
    await ring.add_model(stub_card("cold"))
    assert (await answer).json()["error"]["message"], "the stub's card gives no vectors: it came as far as that"


async def test_a_client_that_goes_leaves_nothing_behind(
    cold: FakeHosts, gateway: RunningGateway, http: httpx.AsyncClient, no_trace: None
) -> None:
    waiting = asyncio.create_task(http.post(CHAT, json=chat()))
    await until(lambda: held(gateway) == 1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until(lambda: held(gateway) == 0)
    assert gateway.service.work._cold_starts._models == {}
    await until(lambda: cold.waiting("cold") == 0)


async def test_a_failed_load_and_a_model_that_fits_nowhere_are_told_at_once(
    cold: FakeHosts, http: httpx.AsyncClient
) -> None:
    await cold.say(HostModel("cold", "failed", error="An old failure.", failed_at=time.time() - 60))
    waiting = asyncio.create_task(http.post(CHAT, json=chat()))
    await until(lambda: cold.waiting("cold") == 1)
    await cold.say(HostModel("cold", "failed", error="It has no weights.", failed_at=time.time() + 1))
    failed = await waiting
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_load_failed")
    assert failed.json()["error"]["message"].endswith("It has no weights.")
    assert failed.headers["x-should-retry"] == "false"

    await cold.say()
    await cold.place("cold", code="model_does_not_fit", reason="The pinned model big would have to go.")
    await until(lambda: cold.waiting("cold") == 0)
    refused = await http.post(CHAT, json=chat())
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_does_not_fit")
    assert "big would have to go" in refused.json()["error"]["message"]


async def test_a_model_that_is_removed_is_waited_for_no_longer(cold: FakeHosts, http: httpx.AsyncClient) -> None:
    waiting = asyncio.create_task(http.post(CHAT, json=chat()))
    await until(lambda: cold.waiting("cold") == 1)
    await cold.registry.delete("cold")
    answer = await waiting
    assert answer.status_code == 503
    assert "removed" in answer.json()["error"]["message"]
    assert (await http.post(CHAT, json=chat())).status_code == 404


async def test_who_waited_in_vain_is_told_how_many_came_before(
    cold: FakeHosts, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    waiting = [asyncio.create_task(http.post(CHAT, json=chat())) for _ in range(2)]
    await until(lambda: held(gateway) == 2)
    figure = partial(gateway.service.registry.get_sample_value, "ryzanstein_gateway_held_requests")
    assert figure({"model": "cold"}) == 2
    with pytest.raises(NoGroupAvailable, match=r"in time; 2 requests are ahead of it\."):
        await gateway.service.work._cold_starts.card("cold", size=lambda: 1, deadline=time.time())
    for one in waiting:
        one.cancel()
    await until(lambda: held(gateway) == 0)
    assert figure({"model": "cold"}) is None


@pytest.fixture
async def small(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings, cold_model_requests=1, cold_bytes=3000, token_timeout=2) as one:
        yield one


@pytest.mark.slow
async def test_the_bounds_and_the_deadline_are_named(small: RunningGateway, hosts: FakeHosts) -> None:
    for name in ("cold", "other"):
        await hosts.register(name)
    await until(lambda: len(small.service.work.catalog.registry.specs) == 2)
    await hosts.place("cold", expected_at=time.time() + 100)
    await until(lambda: small.service.work.catalog.expected_seconds("cold"))
    async with small.http() as http:
        waiting = asyncio.create_task(http.post(CHAT, json=chat()))
        await until(lambda: held(small) == 1)
        full = await http.post(CHAT, json=chat())
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert "limit cold_model_requests: 1 entries, RYZANSTEIN_COLD_MODEL_REQUESTS" in full.text
        assert 90 < int(full.headers["retry-after"]) <= 100
        large = await http.post(CHAT, json=chat("other", user="x" * 100, stop=["y" * 1000] * 4))
        assert "limit cold_bytes: 3,000 bytes" in large.text
        late = await waiting
        assert (late.status_code, late.json()["error"]["code"]) == (503, "no_group_available")
        assert "is loading and could not take the request in time; it is expected in" in late.text
        assert 90 < int(late.headers["retry-after"]) <= 100


async def test_a_generation_of_a_websocket_can_be_cancelled_while_it_waits(
    cold: FakeHosts, gateway: RunningGateway
) -> None:
    from websockets.asyncio.client import connect

    async with connect(gateway.websocket_url) as socket:
        await socket.send(
            '{"type":"generate","id":"a","endpoint":"chat.completions","request":'
            '{"model":"cold","messages":[{"role":"user","content":"Hi"}]}}'
        )
        await until(lambda: held(gateway) == 1)
        await socket.send('{"type":"cancel","id":"a"}')
        assert '"cancelled":true' in str(await socket.recv())
    await until(lambda: held(gateway) == 0)


async def test_a_batch_asks_for_its_model(cold: FakeHosts, client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"gpt-4","prompt":"Hi"}}\n'
    file = await client.files.create(file=("lines.jsonl", line), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    await until(lambda: cold.waiting("cold") == 1)
    await ring.add_model(stub_card("cold"))
    await ring.put_record("ready", model="cold")

    async def over() -> bool:
        seen: Batch = await client.batches.retrieve(batch.id)
        assert not seen.errors, seen.errors
        return seen.status == "completed"

    await until(over)
    await until(lambda: cold.waiting("cold") == 0)


async def test_a_model_that_an_executor_loads_of_its_own_accord_is_listed_and_waited_for(
    nats_settings: CommonSettings, hosts: FakeHosts
) -> None:
    """As at the start of a stack: the gateway is ready, and the first group is loading."""
    ring = FakeRing(hosts.bus)
    await ring.listen()
    async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
        await ring.put_record("starting", model="first")
        await until(lambda: gateway.service.work.catalog.names() == ["first"])
        (listed,) = (await client.models.list()).data
        assert (listed.id, listed.status["value"]) == ("first", "loading")  # type: ignore[attr-defined]
        assert gateway.service.models() == [], "who starts the stack waits until it is served"
        answer = asyncio.create_task(client.completions.create(model="first", prompt="Hi"))
        await until(lambda: held(gateway) == 1)
        await ring.start(stub_card("first"))
        await ring.put_record("ready", model="first")
        assert (await answer).model == "first"
        await ring.put_record("starting", model="second")
        await until(lambda: "second" in gateway.service.work.catalog.names())
        left = asyncio.create_task(client.completions.create(model="second", prompt="Hi"))
        await until(lambda: held(gateway) == 1)
        await ring.put_record("gone", model="second")
        with pytest.raises(openai.InternalServerError, match="loading it has gone"):
            await left
    await ring.stop()

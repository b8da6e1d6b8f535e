"""POST /v1/sessions/{id}/prefill over HTTP: what a ring gets of it, and what a client hears."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from services.gateway.intake.prompts.kv_cache import session_of
from shared import limits
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, silence, until

PREFILL = "/v1/sessions/s1/prefill"
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": TALK} | fields


@pytest.fixture
async def ready(gateway: RunningGateway, ring: FakeRing) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that knows of a group at work."""
    await ring.put_record("ready")
    await until(lambda: gateway.service.work.catalog.has_ready_group(MODEL))
    async with gateway.http() as client:
        yield client


async def test_a_conversation_is_computed_on_its_sessions_group(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await ready.post(PREFILL, json=body(stream=True, max_tokens=50))
    assert answer.status_code == 200
    told = answer.json()
    [request] = ring.requests
    prompt = bytes(request.prompt)
    assert prompt.startswith(b"Hi\nHello\n")
    assert (request.prefill, request.max_tokens, request.lane) == (True, 1, "interactive")
    assert request.session == session_of("", "s1")
    assert told | {"id": ""} == {
        "id": "",
        "object": "session.prefill",
        "session": "s1",
        "model": MODEL,
        "status": "completed",
        "prompt_tokens": len(prompt),
        "cached_tokens": 4,
        "computed_tokens": len(prompt) - 4,
    }
    assert request.generation_id.startswith(told["id"].removeprefix("chatcmpl-"))


async def test_the_input_of_a_response_is_computed_too(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await ready.post(PREFILL, json={"model": MODEL, "input": "Hi", "instructions": "Be brief."})
    assert answer.status_code == 200
    assert bytes(ring.requests[0].prompt).startswith(b"Be brief.\nHi\n")


async def test_the_same_again_joins_and_another_takes_its_place(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    go = asyncio.Event()

    async def wait(fake: FakeRing, request: GenerationRequest) -> None:
        await go.wait()
        await fake.emit(request, 0, [97], finish="length")

    ring.behave = wait
    first = await ready.post(PREFILL, params={"wait": 0}, json=body())
    again = await ready.post(PREFILL, params={"wait": 0}, json=body())
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert first.json()["status"] == "in_progress"
    assert first.json()["computed_tokens"] is None

    joined = asyncio.create_task(ready.post(PREFILL, json=body()))
    await until(lambda: len(ring.requests) == 1)
    longer = [*TALK, {"role": "user", "content": "More"}, {"role": "assistant", "content": "Yes"}]
    newer = asyncio.create_task(ready.post(PREFILL, json=body(messages=longer)))
    assert (await joined).json()["status"] == "cancelled"
    await until(lambda: len(ring.requests) == 2)
    go.set()
    assert (await newer).json()["status"] == "completed"
    assert [len(request.prompt) for request in ring.requests] == sorted(
        {len(request.prompt) for request in ring.requests}
    )


async def test_what_is_under_way_is_deleted(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = silence
    await ready.post(PREFILL, params={"wait": 0}, json=body())
    await until(lambda: len(ring.requests) == 1)
    answer = await ready.delete(PREFILL)
    assert answer.json() == {"session": "s1", "cancelled": True, "object": "session.prefill"}
    await until(lambda: bool(ring.cancelled | ring.commanded))
    assert (await ready.delete(PREFILL)).json()["cancelled"] is False
    assert (await ready.delete("/v1/sessions/other/prefill")).json()["cancelled"] is False


async def test_what_cannot_be_is_refused_in_a_sentence(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    for path, fields, status, message in [
        (PREFILL, {"messages": []}, 400, "Invalid 'messages'"),
        (PREFILL, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "maximum context length"),
        (PREFILL, {"model": "no-model"}, 404, "does not exist"),
        (f"{PREFILL}?wait=61", {}, 400, "wait"),
        (f"{PREFILL}?until=1", {}, 400, "until"),
        (f"/v1/sessions/{'x' * 257}/prefill", {}, 400, "1 to 256 printable ASCII characters"),
        ("/v1/sessions/%C3%A9/prefill", {}, 400, "1 to 256 printable ASCII characters"),
    ]:
        answer = await ready.post(path, json=body(**fields))
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
        assert not ring.requests


async def test_an_empty_body_and_a_failed_ring(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await ready.post(PREFILL, content=b"", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    ring.behave = failing("context_length_exceeded", "No room.")
    answer = await ready.post(PREFILL, json=body())
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "No room.")


async def test_a_model_that_is_not_loaded_stays_so(http: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await http.post(PREFILL, json=body())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_not_loaded"
    assert not ring.requests


async def test_an_operator_can_turn_it_off(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, prefill_ahead=False) as gateway, gateway.http() as client:
        answer = await client.post(PREFILL, json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "prefill_off")


async def test_a_tenant_prepares_so_many_sessions_at_a_time(ready: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = silence
    for number in range(limits.PREFILLS.value):
        answer = await ready.post(f"/v1/sessions/s{number}/prefill", params={"wait": 0}, json=body())
        assert answer.status_code == 202
    answer = await ready.post("/v1/sessions/more/prefill", params={"wait": 0}, json=body())
    assert answer.status_code == 429
    assert "limit prefills" in answer.json()["error"]["message"]

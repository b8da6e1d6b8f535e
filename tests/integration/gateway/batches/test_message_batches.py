"""Anthropic's message batches, by its official client, over the batches that there are."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.messages import MessageBatch

from shared.messages import GenerationRequest
from tests.integration.gateway.batches.helpers import jsonl, ready, submit
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, silence

BATCHES = "/v1/messages/batches"


@pytest.fixture(autouse=True)
async def group(ring: FakeRing) -> None:
    await ready(ring)


def request(custom_id: str, **changes: Any) -> Any:
    params = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "params": params | changes}


def as_openai(batch: MessageBatch) -> str:
    """Its id in /v1/batches."""
    return "batch_" + batch.id.removeprefix("msgbatch_")


async def ended(claude: anthropic.AsyncAnthropic, batch: str, seconds: float = 60) -> MessageBatch:
    async with asyncio.timeout(seconds):
        while True:
            found = await claude.messages.batches.retrieve(batch)
            if found.processing_status == "ended":
                return found
            assert found.request_counts.processing == sum(found.request_counts.model_dump().values())
            await asyncio.sleep(0.05)


async def results_of(claude: anthropic.AsyncAnthropic, batch: str) -> dict[str, Any]:
    return {item.custom_id: item.result async for item in await claude.messages.batches.results(batch)}


async def test_a_batch_from_its_beginning_to_its_end(
    claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        if bytes(request.prompt).startswith(b"bad"):
            await ring.emit(request, 0, [], finish="error", error=("invalid_request", "Not this one.", False))
        else:
            await say(ring, request)

    ring.behave = behave
    made = await claude.messages.batches.create(requests=[request("a"), request("bad"), request("c")])
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
    assert made.request_counts.processing == 3
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    done = await ended(claude, made.id)
    counts = done.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled) == (2, 1, 0, 0)
    assert done.ended_at is not None
    results = await results_of(claude, made.id)
    assert {name: result.type for name, result in results.items()} == {
        "a": "succeeded",
        "bad": "errored",
        "c": "succeeded",
    }
    message = results["a"].message
    assert [block.text for block in message.content] == ["Hello, world!"]
    assert (message.stop_reason, message.usage.service_tier) == ("end_turn", "batch")
    assert results["bad"].error.type == "error"
    assert "Not this one." in results["bad"].error.error.message
    assert {one.lane for one in ring.requests} == {"batch"}
    seen = await client.batches.retrieve(as_openai(made))
    assert (seen.endpoint, seen.status) == ("/v1/messages", "completed")
    assert seen.usage.output_tokens == 26
    deleted = await claude.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.batches.retrieve(made.id)
    assert (await client.files.list()).data == []


async def test_a_batch_that_is_cancelled_says_so_of_each_request(
    claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI, ring: FakeRing, http: httpx.AsyncClient
) -> None:
    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        await (say if bytes(request.prompt).startswith(b"r0\n") else silence)(ring, request)

    ring.behave = behave
    made = await claude.messages.batches.create(requests=[request(f"r{number}") for number in range(40)])
    early = await http.get(f"{BATCHES}/{made.id}/results")
    assert (early.status_code, early.json()["error"]["type"]) == (404, "not_found_error")
    with pytest.raises(anthropic.ConflictError):
        await claude.messages.batches.delete(made.id)
    async with asyncio.timeout(60):  # its result is stored, and told
        while True:
            counts = (await client.batches.retrieve(as_openai(made))).request_counts
            if counts is not None and counts.completed:
                break
            await asyncio.sleep(0.05)
    cancelled = await claude.messages.batches.cancel(made.id)
    assert cancelled.processing_status == "canceling"
    done = await ended(claude, made.id)
    assert done.cancel_initiated_at is not None
    results = await results_of(claude, made.id)
    assert len(results) == 40
    succeeded = [name for name, result in results.items() if result.type == "succeeded"]
    assert succeeded == ["r0"]
    assert {result.type for name, result in results.items() if name != "r0"} == {"canceled"}
    assert (done.request_counts.succeeded, done.request_counts.canceled) == (1, 39)


async def test_what_is_wrong_is_told_before_the_batch_is_taken(
    claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient
) -> None:
    create = claude.messages.batches.create
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\]\.params\.n.*Unknown parameter"):
        await create(requests=[request("a"), request("b", n=2)])
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\]\.custom_id.*duplicate"):
        await create(requests=[request("a"), request("a")])
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[0\]\.params.*stream"):
        await create(requests=[request("a", stream=True)])
    with pytest.raises(anthropic.NotFoundError, match=r"requests\[1\]\.params\.model"):
        await create(requests=[request("a"), request("b", model="nobody")])
    with pytest.raises(anthropic.BadRequestError, match="'requests'"):
        await create(requests=[])
    assert (await http.get("/v1/files")).json()["data"] == []
    assert (await http.get("/v1/batches")).json()["data"] == []
    for path in ("msgbatch_0", "batch_0", "x"):
        assert (await http.get(f"{BATCHES}/{path}")).status_code == 404


async def test_batches_are_listed_from_either_side(claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    body = {"requests": [request("a")]}
    first = (await http.post(BATCHES, json=body, headers=headers)).json()["id"]
    assert (await http.post(BATCHES, json=body, headers=headers)).json()["id"] == first
    refused = await http.post(BATCHES, json={"requests": [request("b")]}, headers=headers)
    assert refused.status_code == 422
    made = [first] + [(await claude.messages.batches.create(requests=[request("a")])).id for _ in range(4)]
    newest = made[::-1]
    page = await claude.messages.batches.list(limit=2)
    assert ([item.id for item in page.data], page.has_more) == (newest[:2], True)
    assert (page.first_id, page.last_id) == (newest[0], newest[1])
    assert [item.id async for item in await claude.messages.batches.list(limit=2)] == newest
    before = await claude.messages.batches.list(limit=2, before_id=newest[3])
    assert ([item.id for item in before.data], before.has_more) == (newest[1:3], True)
    between = await claude.messages.batches.list(after_id=newest[0], before_id=newest[3])
    assert [item.id for item in between.data] == newest[1:3]
    with pytest.raises(anthropic.NotFoundError, match="after_id"):
        await claude.messages.batches.list(after_id="nobody")


async def test_lines_of_a_file_are_a_message_batch_too(
    claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": request("a")["params"]}
    batch = await submit(client, jsonl([line]), endpoint="/v1/messages")
    done = await ended(claude, "msgbatch_" + batch.id.removeprefix("batch_"))
    assert {name: result.type for name, result in (await results_of(claude, done.id)).items()} == {"a": "succeeded"}
    await claude.messages.batches.delete(done.id)
    assert [file.id for file in (await client.files.list()).data] == [batch.input_file_id]

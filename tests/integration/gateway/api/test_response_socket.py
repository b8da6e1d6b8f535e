"""Responses over WebSocket, as the official client speaks it."""

import json
from typing import Any

import openai
import pytest

from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, silence
from tests.integration.gateway.turns import no_room


async def until_end(connection: Any) -> list[Any]:
    events = []
    async for event in connection:
        events.append(event)
        if event.type in ("response.completed", "response.failed", "response.incomplete", "error"):
            break
    return events


async def test_responses_one_after_the_other(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = saying("Hello.")
    async with client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="I am Ada.")
        first = await until_end(connection)
        assert [event.sequence_number for event in first] == list(range(len(first)))
        assert first[-1].response.output[0].content[0].text == "Hello."
        await connection.response.create(
            model=MODEL, input="Who?", previous_response_id=first[-1].response.id, stream_id="lane"
        )
        second = await until_end(connection)
        assert {event.stream_id for event in second} == {"lane"}
        assert bytes(ring.requests[-1].prompt) == b"I am Ada.\nHello.\nWho?\n"
    shown = await client.responses.retrieve(first[-1].response.id)
    assert shown.output == first[-1].response.output


async def test_a_prompt_is_computed_before_it_is_wanted(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """Nothing is said, and a later response goes on behind it."""
    ring.behave = saying("Hello.")
    async with client.responses.connect() as connection:
        for more in ({}, {"prompt_cache_options": {"mode": "implicit"}}):
            body = {"model": MODEL, "input": "I am Ada.", "generate": False}
            await connection.send_raw(json.dumps({"type": "response.create"} | body | more))
            events = await until_end(connection)
            kinds = [event.type for event in events]
            assert kinds == ["response.created", "response.in_progress", "response.completed"]
            assert events[-1].response.output == []
            assert ring.requests[-1].max_tokens == 1
        await connection.response.create(model=MODEL, input="Who?", previous_response_id=events[-1].response.id)
        assert (await until_end(connection))[-1].response.output[0].content[0].text == "Hello."
    assert bytes(ring.requests[-1].prompt) == b"I am Ada.\nWho?\n"
    made = await client.conversations.create(items=[{"role": "user", "content": "I am Ada."}])
    warmed = await client.responses.create(
        model=MODEL, input="So?", conversation=made.id, prompt_cache_options={"prewarm": True}
    )
    assert (warmed.status, warmed.output) == ("completed", [])
    assert ring.requests[-1].prefill, "it makes way for whoever waits"
    assert bytes(ring.requests[-1].prompt) == b"I am Ada.\nSo?\n"
    assert len((await client.conversations.items.list(made.id)).data) == 1  # it is prepared, and not gone on with


async def test_an_error_ends_its_response_alone(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async with client.responses.connect() as connection:
        for wrong, param in (
            ({"model": MODEL, "input": []}, "input"),
            ({"model": MODEL, "input": "x", "stream": False}, "stream"),
            ({"model": MODEL, "input": "x", "generate": 0}, "generate"),
            ({"model": MODEL, "input": "x", "generate": False, "prompt_cache_options": []}, "prompt_cache_options"),
            ({"model": MODEL, "input": "x", "nonsense": 1}, "nonsense"),
            ({"model": MODEL, "input": "x", "stream_id": ""}, "stream_id"),
            ({"model": MODEL, "input": "x", "stream_id": 1}, "stream_id"),
            ({"type": "response.steer", "previous_response_id": "x", "input": []}, "type"),
            ({"type": None}, "type"),
        ):
            await connection.send_raw(json.dumps({"type": "response.create"} | wrong))
            (event,) = await until_end(connection)
            assert (event.type, event.status, event.error.param) == ("error", 400, param)
        await connection.send_raw("no JSON")
        assert (await until_end(connection))[0].type == "error"
        await connection.response.create(model="none", input="x", stream_id="lane")
        (event,) = await until_end(connection)
        assert (event.status, event.stream_id) == (404, "lane")
        ring.behave = saying("Hello.")
        await connection.response.create(model=MODEL, input="x")
        assert (await until_end(connection))[-1].type == "response.completed"


async def test_one_response_at_a_time_and_lane(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = silence
    async with client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="a")
        assert (await connection.recv()).type == "response.created"
        assert (await connection.recv()).type == "response.in_progress"
        await connection.response.create(model=MODEL, input="b")
        refused: Any = await connection.recv()
        assert (refused.type, refused.error.code) == ("error", "duplicate_id")
        ring.behave = saying("Hello.")
        await connection.response.create(model=MODEL, input="c", stream_id="lane")
        events = await until_end(connection)
        assert events[-1].type == "response.completed"


@pytest.mark.parametrize("method", ["send_raw", "send"])
async def test_both_kinds_of_frames_are_read(client: openai.AsyncOpenAI, ring: FakeRing, method: str) -> None:
    ring.behave = saying("Hello.")
    body: Any = {"type": "response.create", "model": MODEL, "input": "x"}
    async with client.responses.connect() as connection:
        await getattr(connection, method)(json.dumps(body).encode() if method == "send_raw" else body)
        assert (await until_end(connection))[-1].type == "response.completed"


async def test_a_large_request_waits_for_its_turn(client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargeRequests, "turn", no_room)
    async with client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="x" * LARGE_REQUEST, stream_id="lane")
        (event,) = await until_end(connection)
        assert (event.status, event.error.code, event.stream_id) == (429, "queue_full", "lane")

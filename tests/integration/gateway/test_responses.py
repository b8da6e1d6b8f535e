"""The Responses API, spoken by the official client."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying


async def test_a_response(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    made = await client.responses.create(model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert made.output_text == "Hello, world!"
    assert made.status == "completed"
    assert made.id.startswith("resp_")
    assert made.metadata == {"a": "b"}
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (12, 13)
    assert made.usage.input_tokens_details.cached_tokens == 4
    assert bytes(ring.requests[0].prompt) == b"Be kind.\nHi\n"
    again = await client.responses.retrieve(made.id)
    assert again == made


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, world!"
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]

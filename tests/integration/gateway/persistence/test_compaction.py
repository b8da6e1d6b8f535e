"""A conversation is made shorter by the model itself, and a later request has its summary in its place."""

from typing import Any

import openai
import pytest

from shared import limits
from shared.messages import GenerationRequest
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, saying
from tests.integration.gateway.responding import prompts

SUMMARY = "Ada lives in Rome."
EXPANDED = f"Summary of the conversation so far:\n{SUMMARY}\n"


async def summarize(ring: FakeRing, request: GenerationRequest) -> None:
    asked = bytes(request.prompt).decode("latin-1")
    await say(ring, request, SUMMARY if asked.startswith("x" * 50) or "Summarize the" in asked else "Yes.")


async def test_a_conversation_is_compacted_and_goes_on(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = saying("Hello.")
    first = await client.responses.create(model=MODEL, input="I am Ada, of Rome.")
    ring.behave = summarize
    made = await client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert prompts(ring)[-1].startswith("I am Ada, of Rome.\nHello.\nSummarize the conversation above")
    assert ring.requests[-1].max_tokens == min(2048 // 8, limits.SUMMARY_TOKENS.value)
    assert (made.object, made.usage.output_tokens) == ("response.compaction", len(SUMMARY))
    (item,) = made.output
    assert item.type == "compaction"
    given: Any = [{"role": "user", "content": "left out"}, item.model_dump(exclude_none=True)]
    after = await client.responses.create(
        model=MODEL, input=[*given, {"role": "user", "content": "Where does Ada live?"}]
    )
    assert prompts(ring)[-1] == f"{EXPANDED}Where does Ada live?\n"
    await client.responses.create(model=MODEL, input="Sure?", previous_response_id=after.id)
    assert prompts(ring)[-1] == f"{EXPANDED}Where does Ada live?\nYes.\nSure?\n"
    with pytest.raises(openai.BadRequestError):
        await client.responses.compact(model=MODEL)


async def test_a_long_conversation_is_compacted_before_it_is_answered(
    client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = summarize
    management: Any = [{"type": "compaction", "compact_threshold": 60}]
    short = await client.responses.create(model=MODEL, input="x" * 50, context_management=management)
    assert len(ring.requests) == 1
    again = await client.responses.create(
        model=MODEL, input="Where?", previous_response_id=short.id, context_management=management
    )
    assert len(ring.requests) == 3
    assert prompts(ring)[-1] == f"{EXPANDED}Where?\n"
    items = (await client.responses.input_items.list(again.id, order="asc")).data
    assert [item.type for item in items] == ["compaction", "message"]
    await client.responses.create(model=MODEL, input="So?", previous_response_id=again.id)
    assert prompts(ring)[-1] == f"{EXPANDED}Where?\nYes.\nSo?\n"


async def test_the_default_threshold_is_half_of_the_context(
    client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = summarize
    management: Any = [{"type": "compaction"}]
    given: Any = [{"role": "user", "content": "x" * 1100}, {"role": "user", "content": "So?"}]
    await client.responses.create(model=MODEL, input=given, context_management=management)
    assert prompts(ring)[-1] == f"{EXPANDED}So?\n"


async def test_the_namespace_of_a_call_is_read_before_its_name(
    client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    given: Any = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}", "namespace": "crm"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "namespace": "crm"},
    ]
    made = await client.responses.create(model=MODEL, input=given)
    assert '"crm.get"' in prompts(ring)[-1]
    items = (await client.responses.input_items.list(made.id, order="asc")).model_dump()["data"]
    assert [item.get("namespace") for item in items[1:]] == ["crm", "crm"]

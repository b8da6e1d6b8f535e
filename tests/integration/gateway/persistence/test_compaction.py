"""A conversation is made shorter by the model itself, and a later request has its summary in its place."""

from typing import Any

import openai
import pytest

from shared import limits
from shared.messages import GenerationRequest
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, say, saying
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


async def test_the_default_threshold_is_half_of_the_context(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = summarize
    management: Any = [{"type": "compaction"}]
    given: Any = [{"role": "user", "content": "x" * 1100}, {"role": "user", "content": "So?"}]
    await client.responses.create(model=MODEL, input=given, context_management=management)
    assert prompts(ring)[-1] == f"{EXPANDED}So?\n"


async def test_the_namespace_of_a_call_is_read_before_its_name(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    given: Any = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}", "namespace": "crm"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "namespace": "crm"},
    ]
    made = await client.responses.create(model=MODEL, input=given)
    assert '"crm__get"' in prompts(ring)[-1]
    items = (await client.responses.input_items.list(made.id, order="asc")).model_dump()["data"]
    assert [item.get("namespace") for item in items[1:]] == ["crm", "crm"]


TRIGGER: Any = {"type": "compaction_trigger"}


async def test_a_trigger_is_answered_by_the_summary(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    """Its events can be read again anywhere, and what comes later reads the summary."""
    ring.behave = saying("Hello.")
    first = await client.responses.create(model=MODEL, input="I am Ada, of Rome.")
    ring.behave = summarize
    tools: Any = [{"type": "function", "name": "f", "parameters": {}}]
    stream = await client.responses.create(
        model=MODEL, input=[TRIGGER], previous_response_id=first.id, stream=True, tools=tools
    )
    events = [event async for event in stream]
    asked = prompts(ring)[-1]
    assert asked.startswith("I am Ada, of Rome.\nHello.\nSummarize the conversation above")
    assert ring.requests[-1].max_tokens == 2048 // 8
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.compaction.compacting"] * len(SUMMARY),
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    (item,) = last.response.output
    assert item.type == "compaction"
    (identity,) = {event.item_id for event in events if event.type == "response.compaction.compacting"}
    assert identity == item.id
    again = await elsewhere.responses.retrieve(last.response.id, stream=True, starting_after=4)
    assert [event async for event in again] == events[5:]
    assert (await elsewhere.responses.input_items.list(last.response.id)).data == []
    await elsewhere.responses.create(model=MODEL, input="Where?", previous_response_id=last.response.id)
    assert prompts(ring)[-1] == f"{EXPANDED}Where?\n"
    reference: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "So?"}]
    await client.responses.create(model=MODEL, input=reference)
    assert prompts(ring)[-1] == f"{EXPANDED}So?\n"


async def test_a_trigger_makes_a_conversation_shorter(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = summarize
    made = await client.conversations.create(items=[{"role": "user", "content": "I am Ada."}])
    job = await client.responses.create(
        model=MODEL, input=[TRIGGER], conversation=made.id, truncation="auto", max_output_tokens=4
    )
    assert (job.status, ring.requests[-1].max_tokens) == ("incomplete", 4)
    listed = [item.type async for item in client.conversations.items.list(made.id, order="asc")]
    assert listed == ["message", "compaction"]
    await client.responses.create(model=MODEL, input="So?", conversation=made.id)
    assert prompts(ring)[-1] == "Summary of the conversation so far:\nAda \nSo?\n"
    counted = await client.responses.input_tokens.count(model=MODEL, input=[TRIGGER], conversation=made.id)
    assert counted.input_tokens > 100


async def test_half_a_summary_stands_for_nothing(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    first = await client.responses.create(model=MODEL, input="I am Ada.")
    ring.behave = failing("internal_error", "broken", behind=b"Ada")
    given: dict[str, Any] = {"model": MODEL, "input": [TRIGGER], "previous_response_id": first.id}
    events = [event async for event in await client.responses.create(**given, stream=True)]
    failed: Any = events[-1]
    assert (failed.type, failed.response.output) == ("response.failed", [])
    ring.behave = saying("")
    empty = await client.responses.create(**given)
    assert (empty.status, empty.output) == ("completed", [])
    await client.responses.create(model=MODEL, input="So?", previous_response_id=empty.id)
    assert prompts(ring)[-1] == "I am Ada.\nHello, world!\nSo?\n"


async def test_a_trigger_stands_last_and_alone_asks_for_nothing(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    hello: Any = {"role": "user", "content": "Hi"}
    wrong: tuple[tuple[Any, str], ...] = (
        ([TRIGGER, hello], "input[0].type"),
        ([hello, TRIGGER, TRIGGER], "input[1].type"),
        ([TRIGGER], "input"),
        ([hello, TRIGGER | {"content": "x"}], "input[1].content"),
    )
    for given, param in wrong:
        for ask in (client.responses.create, client.responses.compact):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(model=MODEL, input=given)
            assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match="must be the last item") as caught:
        await client.conversations.create(items=[hello, TRIGGER])
    assert caught.value.param == "items[1].type"
    ring.behave = summarize
    made = await client.responses.compact(model=MODEL, input=[hello, TRIGGER])
    assert prompts(ring)[-1].count("Summarize the") == 1
    assert made.output[0].type == "compaction"

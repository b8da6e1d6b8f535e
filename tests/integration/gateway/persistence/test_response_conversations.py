"""Conversations of responses: continued, listed, cut, kept and deleted, at any gateway."""

from typing import Any

import httpx
import openai
import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence
from tests.integration.gateway.responding import drop_journal, kept, prompts


async def test_a_conversation_goes_on_at_another_gateway(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    first = await client.responses.create(model=MODEL, input="One", instructions="Once.")
    second = await elsewhere.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    third = await client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Three"}], previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    said = "Hello, world!\n"
    assert prompts(ring) == ["Once.\nOne\n", f"One\n{said}Two\n", f"One\n{said}Two\n{said}Three\n"]


async def test_items_are_listed_and_referred_to(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    made = await client.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "input_text", "text": text} for text in "bc"]},
            {"role": "assistant", "content": "d"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": "e"},
        ],
    )
    assert prompts(ring) == ["a\nb\nc\nd\ne\n"]
    items = [item async for item in client.responses.input_items.list(made.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message", "message", "message", "reasoning", "message"]
    assert len({item.id for item in items}) == 5
    newest = await client.responses.input_items.list(made.id, limit=1)
    assert newest.data == items[-1:]
    assert newest.has_more
    await client.responses.create(
        model=MODEL,
        input=[
            {"type": "item_reference", "id": str(items[1].id)},
            {"id": str(made.output[0].id)},
            *[item.model_dump(exclude_unset=True) for item in made.output],  # type: ignore[list-item]
        ],
    )
    assert prompts(ring)[1] == "b\nc\nHello, world!\nHello, world!\n"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0].id")


async def test_a_reference_costs_what_it_stands_for_each_time(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, history_bytes=1 << 20) as running, running.openai() as client:
        parts: Any = [{"type": "input_text", "text": "a" * 50_000}] * 2
        made = await client.responses.create(
            model=MODEL,
            input=[{"role": "user", "content": parts}, {"role": "user", "content": "Hi"}],
            truncation="auto",
        )
        (first,) = (await client.responses.input_items.list(made.id, order="asc", limit=1)).data
        reference: Any = {"type": "item_reference", "id": first.id}
        counted = await client.responses.input_tokens.count(model=MODEL, input=[reference] * 2)
        assert 200_000 <= counted.input_tokens < 200_100
        for ask in (client.responses.input_tokens.count, client.responses.create):
            with pytest.raises(openai.APIStatusError, match="limit history_bytes") as caught:
                await ask(model=MODEL, input=[reference] * 12)
            assert (caught.value.status_code, caught.value.code) == (413, "payload_too_large")
        with pytest.raises(openai.APIStatusError, match="limit history_bytes"):
            await client.conversations.create(items=[reference] * 12)


async def test_old_items_make_room_where_that_is_wanted(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """The stub's context has 2048 tokens, one a character."""
    items: Any = [{"role": "user", "content": f"{number:03} " + "x" * 495} for number in range(6)]
    request: dict[str, Any] = {"model": MODEL, "input": items, "max_output_tokens": 20, "instructions": "Stay."}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**request)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert "input resulted in 3006 tokens" in caught.value.message
    await client.responses.create(**request, truncation="auto")
    kept = [line[:3] for line in prompts(ring)[0].splitlines()]
    assert kept == ["Sta", "002", "003", "004", "005"]
    request["input"] = [{"role": "user", "content": "x" * 3000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(**request, truncation="auto")
    counted = await client.responses.input_tokens.count(model=MODEL, input="x" * 3000, instructions="Hi")
    assert counted.input_tokens == 3004


async def test_only_what_is_kept_goes_on(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    made = await client.responses.create(model=MODEL, input="Hi", store=False)
    assert made.output_text == "Hello, world!"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    ring.behave = silence
    running = await client.responses.create(model=MODEL, input="Hi", background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=running.id)
    assert caught.value.code == "response_not_ended"


async def test_what_is_deleted_is_gone(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    made = await client.responses.create(model=MODEL, input="Hi")
    await elsewhere.responses.delete(made.id)
    for one in (client, elsewhere):
        with pytest.raises(openai.NotFoundError) as caught:
            await one.responses.retrieve(made.id)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            await one.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert (await http.get(f"/v1/generations/{made.id}")).status_code == 404  # though the journal has it


async def test_a_response_outlives_the_journal(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, gateway: RunningGateway, bus: Bus, ring: FakeRing
) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True, top_logprobs=1)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    await kept(gateway, last.response.id)
    await drop_journal(bus)
    assert await elsewhere.responses.retrieve(last.response.id) == last.response
    again = await elsewhere.responses.retrieve(last.response.id, stream=True)
    assert [event async for event in again] == events
    rest = await elsewhere.responses.retrieve(last.response.id, stream=True, starting_after=9)
    assert [event async for event in rest] == events[10:]
    await elsewhere.responses.create(model=MODEL, input="Go on", previous_response_id=last.response.id)
    assert prompts(ring)[1] == "Hi\nHello, world!\nGo on\n"
    assert (await elsewhere.responses.cancel(last.response.id)).status == "completed"


async def test_a_large_response_is_kept_in_parts(
    client: openai.AsyncOpenAI, gateway: RunningGateway, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.persistence.store.ROOM", bus.max_payload - 100)
    made = await client.responses.create(model=MODEL, input="Hi", metadata={"much": "0123456789" * 40})
    await kept(gateway, made.id)
    head = await gateway.service._backend.parts.responses._store.bucket.get("", made.id.removeprefix("resp_"))
    assert head.value.parts > 3
    await drop_journal(bus)
    assert await client.responses.retrieve(made.id) == made
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)

"""Responses that go on while nobody listens, or under a key: polled, streamed, cancelled from anywhere."""

import openai
from openai.types.responses import ResponseStreamEvent

from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, until
from tests.integration.gateway.responding import RESPONSES, kept, status, text_of
from tests.integration.gateway.resuming import Paced

TEXT = "A response is a log, too."


async def test_a_background_response_is_polled(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT.encode(), 0)
    made = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert (await elsewhere.responses.retrieve(made.id)).status == "queued"
    paced.allow(10)

    running = await status(elsewhere, made.id, "in_progress")
    assert running.output_text == TEXT[: len(running.output_text)]
    paced.allow()
    for at in (client, elsewhere):
        assert (await status(at, made.id, "completed")).output_text == TEXT
    assert len(ring.requests) == 1


async def test_a_background_stream_goes_on_anywhere(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT.encode(), 8)
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    events: list[ResponseStreamEvent] = []
    async for event in stream:
        events.append(event)
        if len(text_of(events)) == 5:
            break
    await stream.close()
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    created = events[0]
    assert created.type == "response.created"
    assert created.response.status == "queued"
    going_on = await elsewhere.responses.retrieve(
        created.response.id, stream=True, starting_after=events[-1].sequence_number
    )
    paced.allow()
    rest = [event async for event in going_on]
    assert text_of(events + rest) == TEXT
    numbers = [event.sequence_number for event in events + rest]
    assert numbers == list(range(len(numbers)))


async def test_a_background_response_is_cancelled_from_anywhere(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = Paced(TEXT.encode(), 4)
    made = await client.responses.create(model=MODEL, input="Hi", background=True)
    stream = await elsewhere.responses.retrieve(made.id, stream=True)
    events: list[ResponseStreamEvent] = []
    async for event in stream:
        events.append(event)
        if len(text_of(events)) == 4:
            break
    cancelled = await client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", TEXT[:4])
    await until(lambda: ring.commanded)
    await stream.close()
    again = await elsewhere.responses.retrieve(made.id, stream=True, starting_after=events[-1].sequence_number)
    last = [event async for event in again][-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    await kept(gateway, made.id)
    assert (await elsewhere.responses.cancel(made.id)).status == "cancelled"


async def test_a_key_stands_for_one_response(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, other: RunningGateway, ring: FakeRing
) -> None:
    key = {"Idempotency-Key": "once"}
    made = await client.responses.create(model=MODEL, input="Hi", extra_headers=key)
    assert await elsewhere.responses.create(model=MODEL, input="Hi", extra_headers=key) == made
    ring.behave = saying(TEXT)
    key = {"Idempotency-Key": "stream"}
    body = {"model": MODEL, "input": "Hi", "stream": True}
    async with other.http() as http:
        first = (await http.post(RESPONSES, json=body, headers=key)).text
        assert (await http.post(RESPONSES, json=body, headers=key)).text == first
        events = first.split("\n\n")
        rest = (await http.post(RESPONSES, json=body, headers=key | {"Last-Event-ID": "7"})).text
    assert rest.split("\n\n")[1:] == events[9:]
    assert "id: 8" in rest.split("\n\n")[0]
    assert len(ring.requests) == 2

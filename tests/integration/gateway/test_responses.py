"""The Responses API, spoken by the official client."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from shared import subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.records import StoredResponse
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, silence, until
from tests.integration.gateway.resuming import Paced

T = TypeVar("T")
TEXT = "A response is a log, too."
RESPONSES = "/v1/responses"


@pytest.fixture
async def other(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings) as running:
        yield running


@pytest.fixture
async def elsewhere(other: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with other.openai() as made:
        yield made


def text_of(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def prompts(ring: FakeRing) -> list[str]:
    return [bytes(request.prompt).decode("latin-1") for request in ring.requests]


async def drop_journal(bus: Bus) -> None:
    """What time does."""
    await bus.jetstream().purge_stream(subjects.JOURNAL_STREAM)


async def until_known(look: Callable[[], Awaitable[T | None]], seconds: float = 10.0) -> T:
    """What `look` finds, once it does."""
    end = time.monotonic() + seconds
    while (found := await look()) is None:
        assert time.monotonic() < end, "it was not found"
        await asyncio.sleep(0.01)
    return found


async def kept(gateway: RunningGateway, identity: str) -> StoredResponse:
    """Waits until the response is in the store."""
    store = gateway.service._backend.responses._store
    return await until_known(lambda: store.get(identity.removeprefix("resp_")))


async def status(client: openai.AsyncOpenAI, identity: str, wanted: str) -> Response:
    """Polls until the response has that status."""

    async def look() -> Response | None:
        shown = await client.responses.retrieve(identity)
        return shown if shown.status == wanted else None

    return await until_known(look)


# --- made, streamed, shown again -----------------------------------------------------------------


async def test_a_response(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    made = await client.responses.create(
        model=MODEL,
        input="Hi",
        instructions="Be kind.",
        metadata={"a": "b"},
        temperature=0.5,
        max_output_tokens=100,
        safety_identifier="s",
        user="u",
        prompt_cache_key="k",
    )
    assert made.output_text == "Hello, world!"
    assert (made.status, made.object, made.model) == ("completed", "response", MODEL)
    assert re.fullmatch("resp_[0-9a-f]{32}", made.id)
    assert (made.instructions, made.metadata, made.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert (made.max_output_tokens, made.top_p, made.truncation) == (100, 1.0, "disabled")
    assert (made.safety_identifier, made.user, made.prompt_cache_key) == ("s", "u", "k")
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (12, 13, 25)
    assert made.usage.input_tokens_details.cached_tokens == 4
    assert prompts(ring) == ["Be kind.\nHi\n"]
    assert ring.requests[0].sampling.temperature == 0.5
    assert ring.requests[0].session.startswith("key-")
    assert await client.responses.retrieve(made.id) == made


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert text_of(events) == "Hello, world!"
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert await client.responses.retrieve(last.response.id) == last.response


async def test_the_clients_own_helper_follows_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello, world!"
    assert kinds[-1] == "response.completed"
    async with client.responses.stream(response_id=final.id, starting_after=6) as again:
        numbers = [event.sequence_number async for event in again]
    assert numbers == list(range(7, len(kinds)))


async def test_the_end_of_the_room_is_told(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=5)
    assert (made.status, made.output_text) == ("incomplete", "Hello")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    (item,) = made.output
    assert item.type == "message"
    assert item.status == "incomplete"


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = made.output[0].content[0]  # type: ignore[union-attr, index]
    assert "".join(score.token for score in part.logprobs) == "Hello, world!"  # type: ignore[union-attr]
    assert [len(score.top_logprobs) for score in part.logprobs] == [2] * 13  # type: ignore[union-attr]
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True, top_logprobs=1)
    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    assert [event.logprobs[0].token for event in deltas] == list("Hello, world!")


async def test_a_failure_is_an_event(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def fail(ring: FakeRing, request: GenerationRequest) -> None:
        await ring.emit(request, 0, list(b"No"))
        await ring.emit(
            request, 2, [], finish="error", error=("invalid_request", "It is too strange.", False)
        )

    ring.behave = fail
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.output_text) == ("failed", "No")
    assert last.response.error is not None
    assert "too strange" in last.response.error.message
    assert (await client.responses.retrieve(last.response.id)).status == "failed"
    with pytest.raises(openai.BadRequestError, match="too strange"):
        await client.responses.create(model=MODEL, input="Hi")


async def test_a_websocket_speaks_it_too(gateway: RunningGateway) -> None:
    import websockets

    async with websockets.connect(gateway.websocket_url) as socket:
        request = {"model": MODEL, "input": "Hi"}
        await socket.send(
            json.dumps({"type": "generate", "id": "a", "endpoint": "responses", "request": request})
        )
        messages = [json.loads(await socket.recv())]
        while messages[-1]["type"] == "chunk":
            messages.append(json.loads(await socket.recv()))
        chunks = [message["chunk"] for message in messages[:-1]]
        assert messages[-1] == {"type": "done", "id": "a"}
        assert [message["position"] for message in messages[:-1]] == [
            chunk["sequence_number"] for chunk in chunks
        ]
        attach = {"type": "attach", "id": "b", "generation": chunks[0]["response"]["id"], "position": 5}
        await socket.send(json.dumps(attach))
        assert json.loads(await socket.recv())["chunk"] == chunks[6]


# --- tools and forms -----------------------------------------------------------------------------

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_a_function_is_called_and_answered(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = saying("I look. " + CALL)
    stream = await client.responses.create(
        model=MODEL, input="Weather in Rome?", tools=[WEATHER], stream=True, parallel_tool_calls=False
    )
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    message, call = last.response.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rome"}, "completed")
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments
    assert {event.item_id for event in deltas} == {call.id}
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.arguments, done.name) == (call.arguments, "weather")
    assert [tool.name for tool in last.response.tools if tool.type == "function"] == ["weather"]
    assert last.response.parallel_tool_calls is False

    rest = await elsewhere.responses.retrieve(
        last.response.id, stream=True, starting_after=deltas[0].sequence_number
    )
    assert [event async for event in rest] == events[deltas[0].sequence_number + 1 :]

    ring.behave = saying("Sunny.")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = await elsewhere.responses.create(
        model=MODEL, input=[output], previous_response_id=last.response.id, tools=[WEATHER]
    )
    assert answer.output_text == "Sunny."
    _, shown = prompts(ring)
    assert shown.index("Weather in Rome?") < shown.index('{"name": "weather", "arguments": {"city": "Rome"}}')
    assert shown.endswith("<tool_response>\nsunny\n</tool_response>\n")
    again: Any = [{"role": "user", "content": "Weather in Rome?"}, *last.response.output, output]
    await client.responses.create(model=MODEL, input=again, tools=[WEATHER])
    assert prompts(ring)[2] == shown


async def test_a_form_is_asked_for_and_read(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    class City(pydantic.BaseModel):
        name: str

    ring.behave = saying('{"name": "Rome"}')
    made = await client.responses.parse(model=MODEL, input="A city.", text_format=City)
    assert made.output_parsed == City(name="Rome")
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.type == "json_schema"
    grammar = ring.requests[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["required"] == ["name"]
    await client.responses.create(model=MODEL, input="JSON!", text={"format": {"type": "json_object"}})
    assert ring.requests[1].grammar is not None


# --- conversations -------------------------------------------------------------------------------


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


async def test_old_items_make_room_where_that_is_wanted(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """The stub's context has 2048 tokens, one a character."""
    items: Any = [{"role": "user", "content": f"{number:03} " + "x" * 495} for number in range(6)]
    request: dict[str, Any] = {
        "model": MODEL,
        "input": items,
        "max_output_tokens": 20,
        "instructions": "Stay.",
    }
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
    client: openai.AsyncOpenAI,
    elsewhere: openai.AsyncOpenAI,
    gateway: RunningGateway,
    bus: Bus,
    ring: FakeRing,
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
    monkeypatch.setattr("services.gateway.responses.store.ROOM", bus.max_payload - 100)
    made = await client.responses.create(model=MODEL, input="Hi", metadata={"much": "0123456789" * 40})
    await kept(gateway, made.id)
    head = await gateway.service._backend.responses._store._bucket.get(made.id.removeprefix("resp_"))
    assert head is not None
    assert head.value.parts > 3
    await drop_journal(bus)
    assert await client.responses.retrieve(made.id) == made
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


# --- in the background ---------------------------------------------------------------------------


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
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
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
    again = await elsewhere.responses.retrieve(
        made.id, stream=True, starting_after=events[-1].sequence_number
    )
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


# --- refused -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_parameter"),
    ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
    ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"store": False, "background": True}, "store", "invalid_value"),
    ({"truncation": "middle"}, "truncation", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "string_above_max_length"),
    ({"metadata": {str(n): "v" for n in range(17)}}, "metadata", "object_above_max_properties"),
    ({"input": []}, "input", "empty_array"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty_array"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "invalid_value"),
    (
        {"input": [{"role": "user", "content": "x", "phase": "commentary"}]},
        "input[0].phase",
        "unsupported_parameter",
    ),
    ({"input": ["x"]}, "input[0]", "invalid_type"),
    ({"input": 5}, "input", "invalid_type"),
    ({"previous_response_id": "nonsense"}, "previous_response_id", "previous_response_not_found"),
    ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x y", "schema": {}}}},
        "text.format.name",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    (
        {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
        "tools[0].defer_loading",
        "unknown_parameter",
    ),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "empty_string"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter"),
]


async def test_what_is_refused_says_why(http: httpx.AsyncClient) -> None:
    for changes, param, code in REFUSED:
        answer = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi"} | changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), changes
        assert error["type"] == "invalid_request_error"


STRANGE: list[tuple[str, int, str]] = [
    ("/resp_1", 404, "response_not_found"),
    ("/chatcmpl-" + "0" * 32, 404, "response_not_found"),
    ("/resp_" + "0" * 32, 404, "response_not_found"),
    ("/{id}?include[]=web_search_call.results", 400, "unsupported_parameter"),
    ("/{id}?stream=perhaps", 400, "invalid_type"),
    ("/{id}?stream=true&starting_after=x", 400, "invalid_type"),
    ("/{id}?stream=true&starting_after=99", 400, "invalid_position"),
    ("/{id}?stream=true&starting_after=-1", 400, "integer_below_min_value"),
    ("/{id}?starting_after=1", 400, "invalid_value"),
    ("/{id}?nonsense=1", 400, "unknown_parameter"),
    ("/{id}/input_items?limit=0", 400, "integer_below_min_value"),
    ("/{id}/input_items?limit=101", 400, "integer_above_max_value"),
    ("/{id}/input_items?order=up", 400, "invalid_value"),
    ("/{id}/input_items?after=msg_1", 400, "invalid_value"),
    ("/{id}/output_items", 404, "unknown_url"),
]


async def test_strange_questions_about_a_response(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    made = await client.responses.create(model=MODEL, input="Hi")
    for path, wanted, code in STRANGE:
        answer = await http.get(RESPONSES + path.replace("{id}", made.id))
        assert (answer.status_code, answer.json()["error"]["code"]) == (wanted, code), path

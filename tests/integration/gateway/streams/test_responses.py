"""The Responses API, spoken by the official client."""

import json
import re
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from services.gateway.intake.prompts.kv_cache import session_of
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, saying
from tests.integration.gateway.responding import prompts, text_of


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
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (12, 13, 25)
    assert made.usage.input_tokens_details.cached_tokens == 4
    assert prompts(ring) == ["Be kind.\nHi\n"]
    assert ring.requests[0].sampling.temperature == 0.5
    assert ring.requests[0].session.startswith(session_of("", "key-"))
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
    ring.behave = failing("invalid_request", "It is too strange.", behind=b"No")
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.output_text) == ("failed", "No")
    assert "too strange" in last.response.error.message
    assert (await client.responses.retrieve(last.response.id)).status == "failed"
    with pytest.raises(openai.BadRequestError, match="too strange"):
        await client.responses.create(model=MODEL, input="Hi")


async def test_a_websocket_speaks_it_too(gateway: RunningGateway) -> None:
    import websockets

    async with websockets.connect(gateway.websocket_url) as socket:
        request = {"model": MODEL, "input": "Hi"}
        await socket.send(json.dumps({"type": "generate", "id": "a", "endpoint": "responses", "request": request}))
        messages = [json.loads(await socket.recv())]
        while messages[-1]["type"] == "chunk":
            messages.append(json.loads(await socket.recv()))
        chunks = [message["chunk"] for message in messages[:-1]]
        assert messages[-1] == {"type": "done", "id": "a"}
        assert [message["position"] for message in messages[:-1]] == [chunk["sequence_number"] for chunk in chunks]
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


@pytest.mark.slow
async def test_a_function_is_called_and_answered(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    ring.behave = saying("I look. " + CALL)
    stream = await client.responses.create(
        model=MODEL, input="Weather in Rome?", tools=[WEATHER], stream=True, parallel_tool_calls=False
    )
    events = [event async for event in stream]
    for event in events:  # to the letter: the client itself takes anything
        pydantic.TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict(), strict=True)
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

    rest = await elsewhere.responses.retrieve(last.response.id, stream=True, starting_after=deltas[0].sequence_number)
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
    assert made.text.format.type == "json_schema"
    grammar = ring.requests[0].grammar
    assert json.loads(grammar.text)["required"] == ["name"]
    await client.responses.create(model=MODEL, input="JSON!", text={"format": {"type": "json_object"}})
    assert ring.requests[1].grammar is not None

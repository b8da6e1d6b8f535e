"""Tool calls, as the official client sends and reads them; shown again by any gateway."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from websockets.asyncio.client import connect

from services.gateway.tool_calls.parser import call_id
from shared.messages import GenerationRequest
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, saying, stub_card, until
from tests.integration.gateway.resuming import Event, Paced, events_of, finishes, public_id, resumed, streamed

CHAT = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Weather in Rome?"}
ARGUMENTS = '{"city": "Rome", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXT = f"Let me see.\n{CALL}\n{NOW}"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of some days.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": TOOLS, "seed": 7}


class GetWeather(pydantic.BaseModel):
    """The weather of some days."""

    city: str
    days: int


async def test_a_call_and_its_result(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """A whole turn: tools in the prompt, a call in the answer, its result in the next prompt."""
    ring.behave = saying(TEXT)
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], tools=TOOLS)
    prompt = bytes(ring.requests[0].prompt).decode()
    assert "The weather of some days." in prompt
    assert "<tool_call>" in prompt
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    first, second = choice.message.tool_calls or ()
    assert first.type == second.type == "function"
    assert (first.function.name, first.function.arguments) == ("get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert [first.id, second.id] == [call_id(ring.requests[0].generation_id, index) for index in (0, 1)]
    ring.behave = saying("It is noon.")
    results: Any = [
        {"role": "tool", "tool_call_id": first.id, "content": "22 degrees"},
        {"role": "tool", "tool_call_id": second.id, "content": "noon"},
    ]
    messages = [USER, choice.message.model_dump(exclude_none=True), *results]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It is noon."
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(ring.requests[1].prompt).decode()
    assert CALL in prompt
    assert "<tool_response>\n22 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in prompt


async def test_the_clients_stream_helper(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = saying(TEXT)
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather"), TOOLS[1]]
    kinds = []
    async with client.chat.completions.stream(model=MODEL, messages=[USER], tools=tools) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert calls[0].function.parsed_arguments == GetWeather(city="Rome", days=2)
    assert calls[1].function.arguments == "{}"
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert "tool_calls.function.arguments.delta" in kinds


async def test_the_clients_parse_helper_is_strict(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """`pydantic_function_tool` makes strict functions: their calls are held to the schema, also in auto."""
    ring.behave = saying(CALL)
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    answer = await client.chat.completions.parse(model=MODEL, messages=[USER], tools=tools)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(city="Rome", days=2)
    grammar = ring.requests[0].grammar
    assert '"<tool_call>"' not in grammar.text.partition("until_calls")[0]


@pytest.mark.parametrize(
    ("choice", "calls", "finish"),
    [
        ("required", 2, "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, 1, "stop"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[1:]}}, 2, "tool_calls"),
    ],
)
async def test_demanded_calls(client: openai.AsyncOpenAI, ring: FakeRing, choice: Any, calls: int, finish: str) -> None:
    """The ring is told what the answer must look like; its family's parser reads what comes."""
    ring.behave = saying(f"{CALL}\n{NOW}")
    options: Any = {"tools": [{**TOOLS[0]}, TOOLS[1]], "tool_choice": choice}
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "now"}}]
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], **options)
    assert len(answer.choices[0].message.tool_calls or ()) == calls
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == finish
    grammar = ring.requests[0].grammar
    assert grammar.kind == "lark"
    assert ("get_weather" in grammar.text) == ("allowed_tools" not in str(choice))


async def test_calls_with_choices_logprobs_and_a_limit(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = saying(CALL)
    answer = await client.chat.completions.create(
        model=MODEL, messages=[USER], tools=TOOLS, n=2, logprobs=True, parallel_tool_calls=False
    )
    ids = [(choice.message.tool_calls or [])[0].id for choice in answer.choices]
    assert len(set(ids)) == 2
    for choice in answer.choices:
        assert len(choice.logprobs.content or ()) == len(CALL)
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], tools=TOOLS, max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert ARGUMENTS.startswith(call.function.arguments)
    assert answer.choices[0].finish_reason == "length"


async def test_functions_of_old(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = saying(CALL)
    functions: Any = [TOOLS[0]["function"]]
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], functions=functions)
    message = answer.choices[0].message
    assert (message.function_call.name, message.function_call.arguments) == ("get_weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "function_call"


async def test_a_parser_that_the_operator_has_chosen(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    await ring.add_model(stub_card("llama", tool_parser="llama3_json"))
    await ring.add_model(stub_card("none", tool_parser="none"))
    await until_listed(http, "llama")
    await until_listed(http, "none")
    ring.behave = saying(f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}')
    answer = await client.chat.completions.create(model="llama", messages=[USER], tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.arguments == ARGUMENTS
    with pytest.raises(openai.BadRequestError, match="tool parser is turned off"):
        await client.chat.completions.create(model="none", messages=[USER], tools=TOOLS)


async def test_a_schema_that_cannot_be_held_is_named(client: openai.AsyncOpenAI) -> None:
    wrong: Any = {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "text"}}},
        },
    }
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOLS[1], wrong])
    assert caught.value.param == "tools[1].function.parameters"
    assert "function 'f'" in caught.value.message


# --- shown again ---------------------------------------------------------------------------------


def message_of(events: list[Event]) -> dict[str, Any]:
    """Content and calls that these events add up to."""
    message: dict[str, Any] = {"content": "", "calls": {}}
    for data, _ in events:
        for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
            message["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                call = message["calls"].setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id", "")
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"]["arguments"]
    return message


async def test_any_place_within_a_call_is_one_to_go_on_from_at_another_gateway(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = saying(TEXT)
    async with gateway.http() as http:
        whole = await streamed(http, CHAT, BODY | {"stream": True})
    once = message_of(whole)
    assert once["content"] == "Let me see."
    assert [call["name"] for call in once["calls"].values()] == ["get_weather", "now"]
    async with other.http() as http:
        for at in range(0, len(whole) - 1, 5):
            rest = await resumed(http, public_id(whole), whole[at][1])
            assert message_of(whole[: at + 1] + rest) == once
            assert finishes(whole[: at + 1] + rest) == ["tool_calls"]
        state = (await http.get(f"/v1/generations/{public_id(whole)}")).json()
    calls = state["response"]["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == [call["id"] for call in once["calls"].values()]
    assert len(ring.requests) == 1


async def test_a_call_goes_on_at_another_gateway_while_it_is_written(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    middle = TEXT.index('"Rome"') + 3
    ring.behave = paced = Paced(TEXT.encode(), middle)
    headers = {"X-Ryzanstein-Background": "30"}
    async with (
        gateway.http() as http,
        http.stream("POST", CHAT, json=BODY | {"stream": True}, headers=headers) as answer,
    ):
        first: list[Event] = []
        async for event in events_of(answer):
            first.append(event)
            if message_of(first)["calls"].get(0, {}).get("arguments", "").endswith("Ro"):
                break
    async with other.http() as http:
        reading = asyncio.create_task(resumed(http, public_id(first), first[-1][1]))
        paced.allow()
        rest = await reading
    assert "get_weather" not in str(rest)
    assert message_of(first + rest)["calls"][0]["arguments"] == ARGUMENTS


async def test_calls_over_a_websocket(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = saying(TEXT)
    events: list[Event] = []
    async with connect(gateway.websocket_url) as connection:
        await connection.send(json.dumps({"type": "generate", "id": "a", "request": BODY}))
        while (message := json.loads(await asyncio.wait_for(connection.recv(), 10)))["type"] == "chunk":
            events.append((json.dumps(message["chunk"]), str(message["position"])))
    assert message["type"] == "done"
    found = message_of(events)
    assert found["content"] == "Let me see."
    assert found["calls"][0]["arguments"] == ARGUMENTS
    assert finishes(events) == ["tool_calls"]
    await until(lambda: ring.answered == 1)


async def test_the_pages_example(gateway: RunningGateway, ring: FakeRing, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        called = b"22 degrees" in bytes(request.prompt)
        await say(ring, request, "It is warm." if called else CALL.replace(', "days": 2', ""))

    ring.behave = behave
    await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8000", gateway.url), {"model": MODEL})
    said = [line for line in capsys.readouterr().out.splitlines() if "[info" not in line]
    assert said == ['get_weather {"city": "Rome"}', "It is warm."]

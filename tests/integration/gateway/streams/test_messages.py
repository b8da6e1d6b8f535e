"""Anthropic's Messages API, spoken by its official client."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from websockets.asyncio.client import connect

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.api_keys import changes_to
from tests.integration.gateway.auth.test_limits import make
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, saying, stub_card, until
from tests.integration.gateway.lifecycle.test_gateway_lost import Lost, gateway_process
from tests.integration.gateway.resuming import Paced

MESSAGES = "/v1/messages"
USER: Any = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [USER]}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of some days.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
Event = dict[str, Any]


def prompts(ring: FakeRing) -> list[str]:
    return [bytes(request.prompt).decode("latin-1") for request in ring.requests]


async def read(response: httpx.Response, seen: list[tuple[Event, str]], most: int | None = None) -> None:
    """Events with their ids, until there are as many as `most`, or to the end."""
    name, data, identity = "", "", ""
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data = value
        elif field == "id":
            identity = value
        elif not line and data:
            event = json.loads(data)
            assert event["type"] == name
            seen.append((event, identity))
            name, data, identity = "", "", ""
            if most is not None and len(seen) >= most:
                return


def text_of(seen: list[tuple[Event, str]]) -> str:
    deltas = [event["delta"] for event, _ in seen if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


async def test_a_message(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    raw = await claude.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=100,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[USER, {"role": "user", "content": [{"type": "text", "text": "there"}]}],
        stop_sequences=["rld"],
        metadata={"user_id": "u" * 159},
        service_tier="standard_only",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    made = await raw.parse()
    assert [(block.type, block.text) for block in made.content if block.type == "text"] == [("text", "Hello, wo")]
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "rld")
    assert (made.role, made.type, made.model) == ("assistant", "message", MODEL)
    assert made.id.startswith("msg_")
    usage = made.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (14, 4, 12)
    assert prompts(ring) == ["Be kind.\nHi\nthere\n"]
    sampling = ring.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert "x-ryzanstein-warning" not in raw.headers


async def test_a_stream_is_the_message(claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    async with claude.messages.stream(model=MODEL, max_tokens=100, messages=[USER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == "Hello, world!"
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)) == 3
    assert final.usage.output_tokens == 13
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    shown = (await http.get(f"/v1/generations/{final.id}")).json()
    assert (shown["endpoint"], shown["status"], shown["position"]) == ("messages", "completed", "18")
    assert shown["response"]["content"] == [{"type": "text", "text": "Hello, world!"}]
    seen: list[tuple[Event, str]] = []
    async with http.stream("GET", f"/v1/generations/{final.id}/stream") as again:
        await read(again, seen)
    assert [int(identity) for _, identity in seen] == list(range(19))
    assert seen[2][0] == {"type": "ping"}
    for known in (0, 3, 17):
        rest: list[tuple[Event, str]] = []
        headers = {"last-event-id": str(known)}
        async with http.stream("GET", f"/v1/generations/{final.id}/stream", headers=headers) as again:
            await read(again, rest)
        assert rest == seen[known + 1 :]
    beyond = await http.get(f"/v1/generations/{final.id}/stream", headers={"last-event-id": "19"})
    assert beyond.status_code == 400
    assert "which has 19 events" in beyond.text


async def test_a_round_of_tools(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    ring.behave = saying(f"Let me see.\n{CALL}")
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": [TOOL]}
    made = await claude.messages.create(messages=[USER], **asked)
    async with claude.messages.stream(messages=[USER], **asked) as stream:
        partial = [event.partial_json async for event in stream if event.type == "input_json"]
        streamed = await stream.get_final_message()
    assert json.loads("".join(partial)) == {"city": "Rome", "days": 2}
    for message in (made, streamed):
        text, call = message.content
        assert text.type == "text"
        assert text.text == "Let me see."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Rome", "days": 2})
        assert call.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
    ring.behave = saying("22 degrees.")
    identity = made.content[1].id if made.content[1].type == "tool_use" else ""
    result: Any = {"type": "tool_result", "tool_use_id": identity, "content": "no such city", "is_error": True}
    turns: Any = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in made.content]},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}, result]},
    ]
    last = await claude.messages.create(messages=turns, tool_choice={"type": "auto"}, **asked)
    assert [block.text for block in last.content if block.type == "text"] == ["22 degrees."]
    prompt = prompts(ring)[-1]
    assert prompt.index('"Rome"') < prompt.index("Error: no such city") < prompt.index("Well?")


async def test_a_tool_that_is_demanded(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    ring.behave = saying(CALL)
    made = await claude.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=[USER],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )
    assert made.stop_reason == "tool_use"
    assert ring.requests[0].grammar is not None
    shaped = await claude.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=[USER],
        output_config={"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}},
    )
    assert shaped.content
    assert ring.requests[1].grammar is not None


async def test_thinking_is_a_block_of_its_own(
    http: httpx.AsyncClient, ring: FakeRing, claude: anthropic.AsyncAnthropic
) -> None:
    await ring.add_model(stub_card("org/thinks", reasoning_parser="think"))
    ring.behave = saying("<think>Let me think.</think>\n\nYes.")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: dict[str, Any] = {"model": "org/thinks", "max_tokens": 2000, "messages": [USER]}
    await until_listed(http, "org/thinks")
    made = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        signatures = [event.signature async for event in stream if event.type == "signature"]
        streamed = await stream.get_final_message()
    assert signatures == [""]
    for message in (made, streamed):
        thought, said = message.content
        assert thought.type == "thinking"
        assert (thought.thinking, thought.signature) == ("Let me think.", "")
        assert said.type == "text"
        assert said.text == "Yes."
    turns: Any = [USER, {"role": "assistant", "content": [block.model_dump() for block in made.content]}, USER]
    await claude.messages.create(**(asked | {"messages": turns}))
    with pytest.raises(anthropic.BadRequestError, match="this model does not support thinking"):
        await claude.messages.create(model=MODEL, max_tokens=2000, messages=[USER], thinking=thinking)
    few: Any = {"type": "enabled", "budget_tokens": 1000}
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens"):
        await claude.messages.create(**asked, thinking=few)


async def test_a_prefill_goes_on(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    ring.behave = saying(" is Paris.")
    turns: Any = [USER, {"role": "assistant", "content": "The capital"}]
    made = await claude.messages.create(model=MODEL, max_tokens=100, messages=turns)
    assert [block.text for block in made.content if block.type == "text"] == [" is Paris."]
    assert prompts(ring)[0].endswith("The capital")


async def test_more_than_the_context_has_room_for(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    ring.behave = saying("x" * 4096)
    made = await claude.messages.create(model=MODEL, max_tokens=32_000, messages=[USER])
    assert made.stop_reason == "model_context_window_exceeded"
    assert made.usage.output_tokens == ring.requests[0].max_tokens == 2048 - 3
    made = await claude.messages.create(model=MODEL, max_tokens=5, messages=[USER])
    assert made.stop_reason == "max_tokens"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "x" * 3000}])


async def test_tokens_are_counted(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, messages=[USER], system="Be kind.")
    await claude.messages.create(model=MODEL, max_tokens=5, messages=[USER], system="Be kind.")
    assert counted.input_tokens == len(ring.requests[0].prompt) == 12
    tools = await claude.messages.count_tokens(model=MODEL, messages=[USER], tools=[TOOL])
    assert tools.input_tokens > counted.input_tokens


async def test_what_is_wrong_is_named(http: httpx.AsyncClient) -> None:
    for changes, said in [
        ({"n": 2}, "Unknown parameter: 'n'."),
        ({"stop": "x"}, "Unknown parameter: 'stop'; this API has 'stop_sequences' for it."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "are: 'assistant', 'system', 'user'"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]}, "this API has 'tool_use'"),
        ({"max_tokens": None}, "max_tokens"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search_20250305'. Supported values of 'tools[0].type' are: 'custom'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
            "'server_tool_use'. Supported values of 'messages[0].content[0].type' are: 'text', 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "'base64'. Supported values of 'messages[0].content[0].source.type' are: 'text', 'content'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
            "'messages[0].content[1]' is not supported by this server; it is an image, and this model",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]},
                ]
            },
            "'messages[2].content[0].content[0]' is not supported by this server; it is an image",
        ),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [TOOL, TOOL]}, "'tools[1].name'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "Tool choice 'g' not found"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers'"),
        ({"thread": {"type": "create"}}, "'thread'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"stop_sequences": ["x"] * 17}, "stop_strings"),
        ({"model": "nobody"}, "nobody"),
    ]:
        refused = await http.post(MESSAGES, json=BODY | changes)
        assert refused.status_code in (400, 404)
        body = refused.json()
        assert (body["type"], body["request_id"]) == ("error", refused.headers["request-id"])
        assert body["error"]["type"] == ("not_found_error" if refused.status_code == 404 else "invalid_request_error")
        assert said in body["error"]["message"]


async def test_what_changes_nothing_is_named(nats_settings: CommonSettings, http: httpx.AsyncClient) -> None:
    body = BODY | {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "speed": "fast",
        "cache_control": {"type": "ephemeral", "scope": "global"},
        "tools": [TOOL | {"defer_loading": True}],
    }
    answer = await http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ryzanstein-ignored-fields"] == (
        "context_management, speed, thinking.display, tools[0].defer_loading, output_config.effort"
    )
    async with run_gateway(nats_settings, strict_fields=True) as strict, strict.http() as client:
        refused = await client.post(MESSAGES, json=body)
        assert refused.status_code == 400
        assert "'context_management'" in refused.json()["error"]["message"]


async def test_versions_and_limits_are_told(gateway: RunningGateway, http: httpx.AsyncClient, bus: Bus) -> None:
    for version, warned in (("2023-06-01", False), ("2026-10-21", False), ("2099-01-01", True), ("<b>\u00e9", True)):
        answer = await http.post(MESSAGES, json=BODY, headers={"anthropic-version": version.encode()})
        assert answer.status_code == 200
        assert ("x-ryzanstein-warning" in answer.headers) is warned
    key = await make(bus, requests_per_minute=2)
    await changes_to(gateway, {}, 401)  # it has read that there is a key
    async with gateway.http(headers={"x-api-key": key.token}) as limited:
        answer = await limited.post(MESSAGES, json=BODY)
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "1"
        assert answer.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        await limited.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, "messages": [USER]})
        refused = await limited.post(MESSAGES, json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    async with gateway.http(headers={"x-api-key": "rz-wrong"}) as stranger:
        refused = await stranger.post(MESSAGES, json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_models_are_listed(claude: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    page = await claude.models.list(limit=1)
    (model,) = page.data
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
    assert (model.max_input_tokens, page.has_more, page.first_id, page.last_id) == (2048, False, MODEL, MODEL)
    assert (await claude.models.retrieve(MODEL)).created_at.year == 2023
    with pytest.raises(anthropic.NotFoundError) as refused:
        await claude.models.retrieve("nobody")
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="after_id"):
        await claude.models.list(after_id="nobody")
    assert (await http.get("/v1/models")).json()["object"] == "list"


async def test_a_repeat_under_a_key_is_the_same_message(http: httpx.AsyncClient, ring: FakeRing) -> None:
    headers = {"Idempotency-Key": "once"}
    first = await http.post(MESSAGES, json=BODY, headers=headers)
    second = await http.post(MESSAGES, json=BODY, headers=headers)
    assert first.json() == second.json()
    assert len(ring.requests) == 1
    other = await http.post(MESSAGES, json=BODY | {"max_tokens": 5}, headers=headers)
    assert (other.status_code, other.json()["error"]["type"]) == (422, "invalid_request_error")


async def test_an_error_within_a_stream_is_an_event(claude: anthropic.AsyncAnthropic, ring: FakeRing) -> None:
    ring.behave = failing("internal", "It broke.", behind=b"A")
    stream = await claude.messages.create(model=MODEL, max_tokens=5, messages=[USER], stream=True)
    kinds: list[str] = []

    async def follow() -> None:
        async for event in stream:
            kinds.append(event.type)

    with pytest.raises(anthropic.APIStatusError) as failed:
        await follow()
    assert kinds[-1] == "content_block_delta"
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]


async def test_a_stream_of_a_killed_gateway_goes_on_at_another(
    bus: Bus, nats_settings: CommonSettings, ring: FakeRing, gateway: RunningGateway, tmp_path: Any
) -> None:
    text = b"A stream is a log, and the connection a cursor."
    ring.behave = paced = Paced(text, 12)
    seen: list[tuple[Event, str]] = []
    headers = {"Idempotency-Key": "k"}

    async def watch(lost: Lost) -> None:
        try:
            async with lost.http.stream("POST", MESSAGES, json=BODY | {"stream": True}, headers=headers) as one:
                await read(one, seen)
        except httpx.TransportError:
            return

    async with gateway_process(bus, nats_settings, tmp_path) as lost:
        reader = asyncio.create_task(watch(lost))
        await until(lambda: len(text_of(seen)) == 12)
        await lost.kill()
        await reader
    paced.allow()
    rest: list[tuple[Event, str]] = []
    headers["Last-Event-ID"] = seen[-1][1]
    sent = BODY | {"stream": True}
    async with gateway.http() as http, http.stream("POST", MESSAGES, json=sent, headers=headers) as one:
        await read(one, rest)
    assert text_of(seen + rest) == text.decode()
    assert [int(identity) for _, identity in seen + rest] == list(range(len(seen + rest)))
    assert rest[-1][0] == {"type": "message_stop"}
    assert len(ring.requests) == 1


async def test_a_message_over_the_websocket(gateway: RunningGateway) -> None:
    request = {name: value for name, value in BODY.items() if name != "stream"}
    async with connect(gateway.websocket_url) as socket:
        asked = {"type": "generate", "id": "a", "endpoint": "messages", "request": request}
        await socket.send(json.dumps(asked))
        chunks: list[Event] = []
        async for text in socket:
            told = json.loads(text)
            if told["type"] == "done":
                break
            if told["type"] == "chunk":
                chunks.append(told["chunk"])
        await socket.send(json.dumps(asked | {"id": "b", "request": request | {"stream": False}}))
        refused = json.loads(await socket.recv())
    assert chunks[0]["type"] == "message_start"
    assert chunks[-1] == {"type": "message_stop"}
    assert text_of([(chunk, "") for chunk in chunks]) == "Hello, world!"
    assert (refused["type"], refused["error"]["param"]) == ("error", "stream")

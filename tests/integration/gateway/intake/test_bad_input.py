"""Every wrong request gets a clear answer in OpenAI's shape, and the gateway goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from services.gateway.core.settings import GatewaySettings
from shared.config import CommonSettings
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence, stub_card, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}

WRONG_CHATS = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"\xff\xfe", "invalid_json", None),
    (b"[]", "invalid_type", None),
    (b'{"web_search_options": ' + b"[" * 100_000, "invalid_json", None),
    (b"{}", "missing_required_parameter", "messages"),
    ({"model": MODEL}, "missing_required_parameter", "messages"),
    (GOOD | {"model": "nobody"}, "model_not_found", "model"),
    (GOOD | {"model": 7}, "invalid_type", "model"),
    (GOOD | {"messages": []}, "empty_array", "messages"),
    (GOOD | {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    (GOOD | {"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    (GOOD | {"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
    (GOOD | {"messages": [{"role": "user", "content": []}]}, "empty_array", "messages[0].content"),
    (
        GOOD | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    (GOOD | {"surprise": 1}, "unknown_parameter", "surprise"),
    (
        GOOD | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
        "unknown_parameter",
        "messages[0].content[0].mood",
    ),
    (GOOD | {"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    (GOOD | {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (GOOD | {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    (GOOD | {"max_tokens": "many"}, "invalid_type", "max_tokens"),
    (GOOD | {"max_tokens": 2046}, "context_length_exceeded", "messages"),
    (GOOD | {"messages": [{"role": "user", "content": "x" * 2048}]}, "context_length_exceeded", "messages"),
    (
        GOOD | {"messages": [{"role": "user", "content": "x" * 2048}], "return_progress": True, "stream": True},
        "context_length_exceeded",
        "messages",
    ),
    (GOOD | {"return_progress": "often"}, "invalid_type", "return_progress"),
    (GOOD | {"n": 1.5}, "invalid_type", "n"),
    (GOOD | {"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    (GOOD | {"stop": [""]}, "empty_string", "stop"),
    (GOOD | {"stop": ["x"] * 17}, "array_above_max_length", "stop"),
    (GOOD | {"logit_bias": {"x": 1}}, "invalid_token_id", "logit_bias"),
    (GOOD | {"logit_bias": {"256": 1}}, "invalid_token_id", "logit_bias"),
    (GOOD | {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (GOOD | {"min_tokens": 9, "ignore_eos": True, "max_completion_tokens": 8}, "integer_above_max_value", "min_tokens"),
    (GOOD | {"min_tokens": 2046, "ignore_eos": True}, "integer_above_max_value", "min_tokens"),
    (GOOD | {"logit_bias": {"7": 101}}, "decimal_above_max_value", "logit_bias.7"),
    (GOOD | {"prompt_cache_options": {"mode": "loud"}}, "invalid_value", "prompt_cache_options.mode"),
    (GOOD | {"seed": 2**70}, "integer_above_max_value", "seed"),
]
WRONG_COMPLETIONS = [
    ({"model": MODEL}, "missing_required_parameter", "prompt"),
    (PLAIN | {"prompt": ""}, "empty_prompt", "prompt"),
    (PLAIN | {"min_tokens": 17, "ignore_eos": True}, "integer_above_max_value", "min_tokens"),
    (PLAIN | {"prompt": []}, "empty_array", "prompt"),
    (PLAIN | {"prompt": [1, "a"]}, "invalid_type", "prompt"),
    (PLAIN | {"prompt": [1, True]}, "invalid_type", "prompt[1]"),
    (PLAIN | {"prompt": [256]}, "invalid_token_id", "prompt"),
    (PLAIN | {"prompt": [[1], [-1]]}, "invalid_token_id", "prompt"),
    (PLAIN | {"prompt": ["x"] * 65, "n": 2}, "array_above_max_length", "prompt"),
    (PLAIN | {"suffix": "end"}, "unsupported_parameter", "suffix"),
]


def checked(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of `answer`, whose shape is OpenAI's."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    shown = answer.json()
    assert set(shown) == {"error"}
    error: dict[str, Any] = shown["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


async def test_wrong_bodies(http: httpx.AsyncClient, ring: FakeRing) -> None:
    cases = [(CHAT, *case) for case in WRONG_CHATS] + [(COMPLETIONS, *case) for case in WRONG_COMPLETIONS]
    for url, sent, code, param in cases:
        data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        answer = await http.post(url, content=data)
        error = checked(answer, 404 if code == "model_not_found" else 400)
        assert error["code"] == code, (sent, error)
        if data != b"{}":
            assert error["param"] == param, (sent, error)
        assert error["type"] == "invalid_request_error"
    assert ring.requests == []
    assert (await http.post(CHAT, json=GOOD)).status_code == 200


async def test_messages_say_what_to_do(http: httpx.AsyncClient) -> None:
    async def message(**fields: object) -> str:
        return str((await http.post(CHAT, json=GOOD | fields)).json()["error"]["message"])

    assert await message(temperature=3) == (
        "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 instead."
    )
    assert await message(n="x") == "Invalid type for 'n': expected an integer, but got a string instead."
    assert await message(foo=1) == "Unknown parameter: 'foo'."
    assert f"the models are: {MODEL}" in await message(model="nobody")
    assert "maximum context length is 2048 tokens" in await message(max_tokens=3000)


async def test_wrong_headers(http: httpx.AsyncClient) -> None:
    for headers in ({"X-Session-ID": ""}, {"X-Session-ID": "x" * 257}, {"X-Session-ID": b"\xe9"}):
        error = checked(await http.post(CHAT, json=GOOD, headers=headers), 400)  # type: ignore[arg-type]
        assert error["param"] == "X-Session-ID"
    answer = await http.post(CHAT, json=GOOD, headers={"x-request-id": "two words"})
    assert checked(answer, 400)["param"] == "x-request-id"
    assert answer.headers["x-request-id"].startswith("req-")
    answer = await http.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
    assert checked(answer, 400)["code"] == "unsupported_encoding"


async def test_wrong_urls_and_methods(http: httpx.AsyncClient) -> None:
    answer = await http.put(CHAT)
    assert checked(answer, 405)["code"] == "method_not_allowed"
    assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == {"GET", "POST"}
    assert checked(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert "WebSocket" in checked(await http.get("/v1/stream"), 404)["message"]
    for path in ("/chat/completions", "/v1/v1/chat/completions"):  # base URLs without /v1, or with it twice
        assert "; it is at /v1/chat/completions." in checked(await http.post(path, json=GOOD), 404)["message"]
    assert "openapi.json" in checked(await http.post("/v1/audio/speech", json=GOOD), 404)["message"]
    assert checked(await http.delete("/v1/models"), 405)["code"] == "method_not_allowed"


async def test_a_body_over_the_limit(http: httpx.AsyncClient) -> None:
    limit = GatewaySettings().body_limit

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(limit // 65_536 + 2):
            yield b" " * 65_536

    answer = await http.post(CHAT, content=b" " * (limit + 1))
    assert checked(answer, 413)["code"] == "payload_too_large"
    assert checked(await http.post(CHAT, content=parts()), 413)["code"] == "payload_too_large"
    assert (await http.post(CHAT, json=GOOD)).status_code == 200


async def test_a_body_that_does_not_come_to_an_end(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, body_timeout=0.1) as gateway, gateway.http() as http:
        reader, writer = await asyncio.open_connection(*gateway.service.address.split(":"))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        head, _, shown = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")  # to its end
        writer.close()
        await writer.wait_closed()
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(shown)["error"]
        assert (error["code"], error["type"]) == ("request_timeout", "invalid_request_error")
        assert (await http.post(CHAT, json=GOOD)).status_code == 200


async def test_a_request_that_nats_would_not_take(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, gateway: RunningGateway
) -> None:
    monkeypatch.setattr(gateway.service.bus.client, "_server_info", {"max_payload": 100}, raising=False)
    monkeypatch.setattr(gateway.service.bus.client, "_max_payload", 100)
    assert checked(await http.post(CHAT, json=GOOD), 413)["code"] == "payload_too_large"
    monkeypatch.undo()
    assert (await http.post(CHAT, json=GOOD)).status_code == 200


async def test_errors_of_ring_and_scheduler_get_their_status(http: httpx.AsyncClient, ring: FakeRing) -> None:
    async def refuse(fake: FakeRing, request: Any) -> None:
        code = bytes(request.prompt).decode().strip()
        await fake.emit(request, 0, [], finish="error", error=(code, "No.", True), group="")

    ring.behave = refuse
    cases = [
        ("queue_full", 429, "rate_limit_error"),
        ("no_group_available", 503, "server_error"),
        ("deadline_exceeded", 504, "server_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
    ]
    for stream in (False, True):
        for code, status, kind in cases:
            answer = await http.post(
                CHAT, json=GOOD | {"messages": [{"role": "user", "content": code}], "stream": stream}
            )
            error = checked(answer, status)
            assert (error["code"], error["message"], error["type"]) == (code, "No.", kind)
            assert ("retry-after" in answer.headers) == (status != 400)
    answer = await http.post(CHAT, json=GOOD | {"messages": [{"role": "user", "content": "boom"}]})
    error = checked(answer, 500)
    assert answer.headers["x-request-id"] in error["message"]


async def test_an_error_within_a_stream_is_an_event_and_the_end(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    async def break_off(fake: FakeRing, request: Any) -> None:
        await fake.emit(request, 0, list(b"Hel"))
        await stage.wait()
        await fake.emit(request, 3, [], finish="error", error=("context_length_exceeded", "Too long.", False))

    stage = asyncio.Event()
    ring.behave = break_off
    stream = await client.chat.completions.create(model=MODEL, messages=GOOD["messages"], stream=True)
    text = ""
    chunks = aiter(stream)
    while text != "Hel":
        text += (await anext(chunks)).choices[0].delta.content or ""
    stage.set()
    with pytest.raises(openai.APIError, match=r"Too long\."):
        await anext(chunks)
    answer = await http.post(CHAT, json=GOOD | {"stream": True})
    assert "Hel" in answer.text
    assert "[DONE]" not in answer.text


async def test_no_token_in_time(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = silence
    async with run_gateway(nats_settings, token_timeout=0.3) as gateway, gateway.http() as http:
        answer = await http.post(CHAT, json=GOOD)
        assert checked(answer, 503)["code"] == "no_group_available"
        assert int(answer.headers["retry-after"]) >= 1
        await ring.put_record("ready")
        catalog = gateway.service._backend.started.catalog
        await until(lambda: catalog.has_ready_group(MODEL))
        assert checked(await http.post(CHAT, json=GOOD), 504)["code"] == "deadline_exceeded"
        await until(lambda: len(ring.cancelled) == 2)


async def test_too_many_at_once(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = silence
    async with run_gateway(nats_settings, max_generations=2) as gateway, gateway.http() as http:
        waiting = asyncio.create_task(http.post(CHAT, json=GOOD | {"n": 2}))
        await until(lambda: len(ring.requests) == 2)
        answer = await http.post(CHAT, json=GOOD)
        assert checked(answer, 429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_one_tenant_leaves_places_to_others(nats_settings: CommonSettings, ring: FakeRing, keys: Keys) -> None:
    ring.behave = silence
    busy, other = bearer(await keys.make("busy")), bearer(await keys.make("other"))
    async with run_gateway(nats_settings, max_generations=5, max_tenant_generations=2) as gateway:
        await changes_to(gateway, other, 200)
        async with gateway.http() as http:
            waiting = [asyncio.create_task(http.post(CHAT, json=GOOD | {"n": 2}, headers=busy))]
            await until(lambda: len(ring.requests) == 2)
            refused = checked(await http.post(CHAT, json=GOOD, headers=busy), 429)
            assert "limit tenant_generations: 2 entries, RYZANSTEIN_MAX_TENANT_GEN" in refused["message"]
            waiting.append(asyncio.create_task(http.post(CHAT, json=GOOD, headers=other)))
            await until(lambda: len(ring.requests) == 3)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_model_without_its_tokenizer(http: httpx.AsyncClient, ring: FakeRing) -> None:
    await ring.add_model(stub_card("bare", tokenizer="not-stored"))
    await until_listed(http, "bare")
    assert "not stored" in checked(await http.post(CHAT, json=GOOD | {"model": "bare"}), 503)["message"]

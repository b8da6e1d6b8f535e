"""Bodies and WebSocket messages that nobody would write: each is answered, none is a fault of ours."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect as websocket

from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL

pytestmark = pytest.mark.usefixtures("no_trace")
EXAMPLES = settings(max_examples=120, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
}
FIELDS = sorted({*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "surprise"})
numbers = st.integers(-(2**70), 2**70) | st.floats(width=64)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
RAW = [
    b"\x00",
    b"\xff\xfe{}",
    b'{"model": "\xc3"}',
    b'{"model": "\\ud800"}',
    b'{"a": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 100_000 + b"}",
    b"[" * 1_000_000,
    b'{"a":' * 200_000,
    b'{"metadata": {' + b",".join(b'"%d": "x"' % index for index in range(100_000)) + b"}}",
    b'{"model": "stub", "stop_token_ids": [' + b"1," * 500_000 + b"1]}",
    b"{}" * 100,
    b'{"model": "a", "model": "b"',
    b'"' + b"x" * 1_000_000,
]


def checked(answer: httpx.Response) -> None:
    """An answer, or an error of the client's in OpenAI's shape."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@EXAMPLES
@given(
    path=st.sampled_from(sorted(GOOD)), changes=st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3)
)
async def test_fields_of_any_value(http: httpx.AsyncClient, path: str, changes: dict[str, Any]) -> None:
    body = json.dumps(GOOD[path] | changes, ensure_ascii=False).encode(errors="surrogatepass")
    checked(await http.post(path, content=body))


@EXAMPLES
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
async def test_bodies_with_bytes_changed(http: httpx.AsyncClient, path: str, data: st.DataObject) -> None:
    body = bytearray(json.dumps(GOOD[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    checked(await http.post(path, content=bytes(body)))


async def test_bodies_that_are_hard_to_read(http: httpx.AsyncClient) -> None:
    for path in GOOD:
        for body in RAW:
            answer = await http.post(path, content=body)
            assert answer.status_code == 400, (body[:80], answer.text)
            checked(answer)
            assert len(answer.content) < 4096, "what was sent is not sent back"
    for path, body in GOOD.items():
        assert (await http.post(path, json=body)).status_code == 200


async def test_of_two_fields_of_one_name_the_last_counts(http: httpx.AsyncClient) -> None:
    """As JSON readers have it, and as the OpenAPI document says."""
    body = b'{"model": "other", "prompt": "Hi", "max_tokens": 3, "model": "%b", "max_tokens": 2}' % MODEL.encode()
    answer = (await http.post("/v1/completions", content=body)).json()
    assert answer["usage"]["completion_tokens"] == 2


@EXAMPLES
@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["generate", "attach", "cancel", "ping", "other"]),
                "id": st.text(max_size=70) | values,
                "endpoint": st.sampled_from(["chat.completions", "completions"]) | leaves,
                "request": st.sampled_from(list(GOOD.values())) | values,
                "generation": st.text(max_size=40) | leaves,
                "position": st.integers() | st.lists(st.integers(), max_size=3) | leaves,
                "idempotency_key": st.text(max_size=10) | leaves,
                "background": st.floats() | leaves,
            },
        )
        | values
        | st.binary(max_size=40),
        min_size=1,
        max_size=8,
    )
)
async def test_websocket_messages_of_any_kind(gateway: RunningGateway, messages: list[Any]) -> None:
    async with websocket(gateway.websocket_url, max_size=None, proxy=None) as socket:
        for message in messages:
            raw = message if isinstance(message, bytes) else json.dumps(message)
            await socket.send(raw)
        await socket.send('{"type":"ping"}')
        async with asyncio.timeout(20):
            while (answer := json.loads(await socket.recv()))["type"] != "pong" or "id" in answer:
                if answer["type"] == "error":
                    assert answer["error"]["type"] != "server_error", answer

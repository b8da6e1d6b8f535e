"""/v1/stream: several generations on one connection."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from services.gateway.intake.prompts.kv_cache import session_of
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, beginning, say, until
from tests.integration.gateway.resuming import Paced
from tests.integration.gateway.turns import no_room

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


class Socket:
    """A client of the protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **message: Any) -> None:
        await self.connection.send(json.dumps(message))

    async def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(self.connection.recv(), 10))
        return message

    async def until_end(self, count: int = 1) -> dict[str, list[dict[str, Any]]]:
        """Messages by id until `count` generations have ended."""
        found: dict[str, list[dict[str, Any]]] = {}
        while count:
            message = await self.receive()
            found.setdefault(message["id"], []).append(message)
            count -= message["type"] in ("done", "error")
        return found


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for message in messages
        if message["type"] == "chunk"
        for choice in message["chunk"]["choices"]
    )


@pytest.fixture
async def socket(gateway: RunningGateway) -> AsyncIterator[Socket]:
    headers = {"x-request-id": "socket-1", "X-Session-ID": "s"}
    async with connect(gateway.websocket_url, additional_headers=headers) as connection:
        assert connection.response.headers["x-request-id"] == "socket-1"
        yield Socket(connection)


async def test_several_generations_at_once(socket: Socket, ring: FakeRing) -> None:
    await socket.send(type="generate", id="a", request=CHAT)
    await socket.send(type="generate", id="b", endpoint="completions", request={"model": MODEL, "prompt": "x"})
    await socket.send(type="generate", id="c", endpoint="chat.completions", request=CHAT | {"n": 2})
    found = await socket.until_end(3)
    assert text_of(found["a"]) == text_of(found["b"]) == "Hello, world!"
    assert len(text_of(found["c"])) == 26
    assert found["a"][-1] == {"type": "done", "id": "a"}
    assert found["a"][-2]["position"] == 15
    assert found["c"][0]["position"] == [0, 0]
    assert found["c"][-2]["position"] == [15, 15]
    assert found["a"][-2]["chunk"]["choices"][0]["finish_reason"] == "stop"
    assert {request.request_id for request in ring.requests} == {"socket-1"}
    assert {request.session for request in ring.requests} == {session_of("", "s")}


async def test_everything_is_streamed_whether_it_says_so_or_not(socket: Socket) -> None:
    request = CHAT | {"stream_options": {"include_usage": True}}
    await socket.send(type="generate", id="a", request=request)
    found = (await socket.until_end())["a"]
    assert text_of(found) == "Hello, world!"
    assert found[-2]["chunk"]["usage"]["completion_tokens"] == 13
    for endpoint in ("chat.completions", "completions"):
        fields = {"model": MODEL, "prompt": "x"} if endpoint == "completions" else CHAT
        await socket.send(type="generate", id="b", endpoint=endpoint, request=fields | {"stream": False})
        (refused,) = (await socket.until_end())["b"]
        assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid_value", "stream")
        await socket.send(type="generate", id="b", endpoint=endpoint, request=fields | {"stream": True})
        assert text_of((await socket.until_end())["b"]) == "Hello, world!"


async def test_positions_name_what_has_been_sent(socket: Socket) -> None:
    await socket.send(type="generate", id="a", request=CHAT | {"stop": "world?"})
    text = ""
    for message in (await socket.until_end())["a"][:-1]:
        text += text_of([message])
        ended = message["chunk"]["choices"][0]["finish_reason"] is not None
        assert message["position"] == 15 if ended else message["position"] >= len(text)


async def test_cancel_ends_one_generation_alone(socket: Socket, ring: FakeRing) -> None:
    go = asyncio.Event()

    async def slow(fake: FakeRing, request: GenerationRequest) -> None:
        await fake.emit(request, 0, list(b"Hello"))
        await go.wait()
        await say(fake, request)

    ring.behave = slow
    await socket.send(type="generate", id="a", request=CHAT)
    await socket.send(type="generate", id="b", request=CHAT)
    seen = set()
    while seen != {"a", "b"}:
        message = await socket.receive()
        if message["type"] == "chunk" and text_of([message]):
            seen.add(message["id"])
    await socket.send(type="cancel", id="a")
    assert await socket.receive() == {"type": "done", "id": "a", "cancelled": True}
    await until(lambda: len(ring.commanded) == 1)
    go.set()
    assert text_of((await socket.until_end())["b"]) == ", world!"
    ring.behave = say
    await socket.send(type="generate", id="a", request=CHAT)  # the id is free again
    assert text_of((await socket.until_end())["a"]) == "Hello, world!"


async def test_wrong_messages_leave_the_connection_up(socket: Socket, ring: FakeRing) -> None:
    ring.behave = beginning(b"H")
    cases: list[tuple[str, str | None, str]] = [
        ("{", None, "invalid_json"),
        ("", None, "invalid_json"),
        ('{"type": "dance"}', None, "invalid_value"),
        ('{"type": "generate", "id": 7}', None, "invalid_type"),
        ('{"type": "generate", "request": {}}', None, "invalid_value"),
        ('{"type": "generate", "id": "x"}', "x", "missing_required_parameter"),
        ('{"type": "generate", "id": "x", "request": {"model": "m"}}', "x", "missing_required_parameter"),
        ('{"type": "generate", "id": "x", "request": []}', "x", "invalid_type"),
        ('{"type": "generate", "id": "x", "endpoint": "poems", "request": {}}', "x", "invalid_value"),
        ('{"type": "cancel", "id": "x"}', "x", "unknown_id"),
        ('{"type": "ping", "more": 1}', None, "unknown_parameter"),
    ]
    for text, identity, code in cases:
        await socket.connection.send(text)
        answer = await socket.receive()
        assert (answer["type"], answer["id"], answer["error"]["code"]) == ("error", identity, code), text
    await socket.send(type="generate", id="a", request=CHAT)
    while not text_of([await socket.receive()]):
        pass
    await socket.send(type="generate", id="a", request=CHAT)
    answer = await socket.receive()
    assert (answer["error"]["code"], answer["refused"]) == ("duplicate_id", True)
    await socket.connection.send(b'{"type": "ping"}')
    assert await socket.receive() == {"type": "pong"}


async def test_closing_cancels_everything(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = beginning(b"H")
    async with run_gateway(nats_settings, resume_grace=0.1) as gateway:
        async with connect(gateway.websocket_url) as connection:
            socket = Socket(connection)
            for identity in "abc":
                await socket.send(type="generate", id=identity, request=CHAT)
            await until(lambda: len(ring.requests) == 3)
        await until(lambda: len(ring.cancelled | ring.commanded) == 3)


async def test_limits_of_one_connection(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = beginning(b"H")
    settings = {"max_generations_per_socket": 1, "body_limit": 2000}
    async with run_gateway(nats_settings, **settings) as gateway:
        async with connect(gateway.websocket_url) as connection:
            socket = Socket(connection)
            await socket.send(type="generate", id="a", request=CHAT)
            await socket.send(type="generate", id="b", request=CHAT)
            found = await socket.until_end()
            assert found["b"][0]["error"]["code"] == "queue_full"
        async with connect(gateway.websocket_url) as connection:
            await connection.send("x" * 3000)
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await asyncio.wait_for(connection.recv(), 10)
            assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("s", {}, 404, "unknown_url"),
        ("", {"x-session-id": "x" * 300}, 400, "invalid_header"),
        ("", {"x-request-id": "x" * 999}, 400, "invalid_header"),
    ],
)
async def test_a_wrong_handshake_is_answered_like_a_request(
    gateway: RunningGateway, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        await connect(gateway.websocket_url + path, additional_headers=headers)
    response = caught.value.response
    assert response.status_code == status
    assert response.headers["x-request-id"]
    assert json.loads(response.body)["error"]["code"] == code


async def test_a_stopping_gateway_closes_the_connection(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = beginning(b"H")
    async with run_gateway(nats_settings, drain_timeout=0.1) as gateway, connect(gateway.websocket_url) as connection:
        socket = Socket(connection)
        await socket.send(type="generate", id="a", request=CHAT)
        while not text_of([await socket.receive()]):
            pass
        gateway.service.end()
        found = await socket.until_end()
        assert "shutting down" in found["a"][-1]["error"]["message"]
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await socket.receive()
        assert closed.value.rcvd.code == 1012
        await gateway.task


async def test_attach_goes_on_from_a_position(
    gateway: RunningGateway, socket: Socket, ring: FakeRing, nats_settings: CommonSettings
) -> None:
    ring.behave = paced = Paced(b"Hello, world!", 5)
    await socket.send(type="generate", id="a", request=CHAT | {"n": 2})
    seen: list[Any] = []
    while len(text_of(seen)) < 10:
        seen.append(await socket.receive())
    generation, position = seen[-1]["chunk"]["id"], seen[-1]["position"]
    await socket.connection.close()
    async with (
        run_gateway(nats_settings) as other,
        connect(other.websocket_url) as first,
        connect(other.websocket_url) as second,
    ):
        for each, fields in ((Socket(first), {"position": position}), (Socket(second), {})):
            await each.send(type="attach", id="b", generation=generation, **fields)
            paced.allow()
            found = (await each.until_end())["b"]
            before = seen if fields else []
            for choice in (0, 1):
                texts = [text_of_choice(message, choice) for message in [*before, *found]]
                assert "".join(texts) == "Hello, world!"
            assert found[-1] == {"type": "done", "id": "b"}
    assert len(ring.requests) == 2


def text_of_choice(message: Any, index: int) -> str:
    choices = message.get("chunk", {}).get("choices", ())
    return "".join(item["delta"].get("content", "") for item in choices if item["index"] == index)


async def test_a_key_makes_generate_a_repeat(socket: Socket, ring: FakeRing) -> None:
    ids = set()
    for name in ("a", "b"):
        await socket.send(type="generate", id=name, request=CHAT, idempotency_key="k", background=5)
        found = (await socket.until_end())[name]
        assert text_of(found) == "Hello, world!"
        ids.add(found[0]["chunk"]["id"])
    assert len(ids) == len(ring.requests) == 1
    await socket.send(type="generate", id="c", request=CHAT, idempotency_key="k", position=5)
    assert text_of((await socket.until_end())["c"]) == ", world!"


async def test_wrong_resumptions_are_refused(socket: Socket) -> None:
    for message, code in [
        ({"type": "attach"}, "missing_required_parameter"),
        ({"type": "attach", "generation": "chatcmpl-x"}, "generation_not_found"),
        ({"type": "attach", "generation": "x", "position": -1}, "invalid_position"),
        ({"type": "attach", "generation": "x", "position": "3"}, "invalid_type"),
        ({"type": "attach", "generation": "x", "position": []}, "invalid_position"),
        ({"type": "generate", "request": CHAT, "position": 3}, "invalid_position"),
        ({"type": "generate", "request": CHAT, "background": -1}, "invalid_header"),
        ({"type": "generate", "request": CHAT, "background": 1e300}, "invalid_header"),
        ({"type": "generate", "request": CHAT, "idempotency_key": ""}, "invalid_header"),
    ]:
        await socket.send(id="a", **message)
        (refused,) = (await socket.until_end())["a"]
        assert refused["error"]["code"] == code


async def test_a_large_request_that_may_not_wait_is_refused_under_its_id(
    socket: Socket, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.behave = paced = Paced(b"Hello.", 3)
    await socket.send(type="generate", id="a", request=CHAT)
    await until(lambda: ring.requests)
    monkeypatch.setattr(LargeRequests, "turn", no_room)
    chat = CHAT | {"messages": [{"role": "user", "content": "x" * LARGE_REQUEST}]}
    await socket.send(type="generate", id="b", request=chat)
    refused = (await socket.until_end())["b"][-1]
    assert refused["error"]["code"] == "queue_full"
    paced.allow()
    assert (await socket.until_end())["a"][-1]["type"] == "done"

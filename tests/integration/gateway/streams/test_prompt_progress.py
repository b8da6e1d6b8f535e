"""How much of a long prompt is computed: told to every kind of client while it has nothing else to read."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from websockets.asyncio.client import connect

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, until

CHAT = "/v1/chat/completions"
PROGRESS = "x-ryzanstein-progress"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi there"},
    "/v1/responses": {"input": "Hi there"},
    "/v1/messages": {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]},
}


class Slow:
    """Tells of so many tokens of the prompt when it is allowed to; says its answer in the end."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()

    async def __call__(self, ring: FakeRing, request: GenerationRequest) -> None:
        while computed := await self.told.get():
            await ring.emit(request, len(request.generated), [], cached=1, computed=computed)
        await say(ring, request, "Hello")


@pytest.fixture
def slow(ring: FakeRing) -> Slow:
    ring.behave = made = Slow()
    return made


class Lines:
    """Of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def until(self, beginning: str) -> str:
        async for line in self._lines:
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the stream has ended before {beginning!r}")

    async def rest(self) -> list[str]:
        return [line async for line in self._lines]


@pytest.mark.parametrize("path", BODIES)
async def test_streams_tell_it_in_comments(gateway: RunningGateway, ring: FakeRing, slow: Slow, path: str) -> None:
    body = {"model": MODEL, "stream": True} | BODIES[path]
    slow.told.put_nowait(2)  # a stream begins with what there is to tell
    async with gateway.http() as http, http.stream("POST", path, json=body) as response:
        lines = Lines(response)
        first = await lines.until(": prompt")
        total = len(ring.requests[0].prompt)
        assert first == f": prompt 2/{total}"
        slow.told.put_nowait(3)
        assert await lines.until(": prompt") == f": prompt 3/{total}"
        slow.told.put_nowait(0)
        rest = await lines.rest()
    assert not [line for line in rest if line.startswith(":")]
    assert "Hello" in "".join(json.dumps(line) for line in rest) or "".join(texts(rest)) == "Hello"
    assert not any("prompt_progress" in line for line in rest)


def texts(lines: list[str]) -> list[str]:
    """Of any API's deltas."""
    found = []
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", ()):
                found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            delta = event.get("delta")
            if event["type"].endswith(".delta") if "type" in event and isinstance(delta, str) else False:
                found.append(delta)
            elif isinstance(delta, dict):
                found.append(delta.get("text", ""))
    return found


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_chunks_tell_it_where_they_are_asked_to(
    gateway: RunningGateway, ring: FakeRing, slow: Slow, path: str
) -> None:
    body = {"model": MODEL, "stream": True, "return_progress": True} | BODIES[path]
    body |= {"stream_options": {"include_usage": True}}
    slow.told.put_nowait(2)
    async with gateway.http() as http, http.stream("POST", path, json=body) as response:
        lines = Lines(response)
        chunk = json.loads((await lines.until("data: ")).removeprefix("data: "))
        slow.told.put_nowait(0)
        rest = await lines.rest()
    progress = chunk["prompt_progress"]
    assert progress.pop("time_ms") >= 0
    assert progress == {"total": len(ring.requests[0].prompt), "cache": 1, "processed": 2}
    assert [choice["finish_reason"] for choice in chunk["choices"]] == [None]
    assert "".join(texts(["data: " + json.dumps(chunk)])) == ""
    assert "".join(texts(rest)) == "Hello"
    assert rest[0].startswith("id: ") is False  # it is of no position: whoever resumes there misses nothing


ASKED = {"X-Ryzanstein-Progress": "true"}
OF_OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"prompt": "Hi there"},
}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", "ping"),
        ("/v1/responses", "ryzanstein:prompt_progress"),
        ("/v1/completions", None),
        ("/api/chat", None),
        ("/api/generate", None),
    ],
)
async def test_each_api_s_own_events_tell_it_where_a_header_asks_them_to(
    gateway: RunningGateway, ring: FakeRing, slow: Slow, path: str, kind: str | None
) -> None:
    body = {"model": MODEL, "stream": True} | (BODIES | OF_OLLAMA)[path]
    slow.told.put_nowait(2)
    async with gateway.http() as http, http.stream("POST", path, json=body, headers=ASKED) as response:
        lines = (line async for line in response.aiter_lines() if "prompt_progress" in line and "{" in line)
        told = json.loads((await anext(lines)).removeprefix("data: "))
        slow.told.put_nowait(0)
        assert [line async for line in lines] == []
    progress = told["prompt_progress"]
    assert progress.pop("time_ms") >= 0
    assert progress == {"total": len(ring.requests[0].prompt), "cache": 1, "processed": 2}
    assert told.get("type") == kind
    if path == "/v1/responses":  # behind what a response begins with
        assert told["sequence_number"] == 1
    if path.startswith("/api"):
        assert told["done"] is False
        assert told["message"]["content"] == "" if path == "/api/chat" else told["response"] == ""


@pytest.mark.parametrize("path", OF_OLLAMA)
async def test_ollama_s_lines_are_its_own_unless_asked(gateway: RunningGateway, slow: Slow, path: str) -> None:
    body = {"model": MODEL} | OF_OLLAMA[path]
    for told in (2, 3, 0):
        slow.told.put_nowait(told)
    async with gateway.http() as http:
        answer = await http.post(path, json=body)
        refused = await http.post(path, json=body, headers={"X-Ryzanstein-Progress": "often"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert not any("prompt_progress" in line for line in lines)
    assert lines[-1]["done"] is True
    assert refused.status_code == 400
    assert "X-Ryzanstein-Progress" in refused.text


async def test_official_clients_pass_over_what_is_not_their_api_s(gateway: RunningGateway, slow: Slow) -> None:
    slow.told.put_nowait(2)
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="any", max_retries=0) as client,
        client.messages.stream(
            model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "Hi"}], extra_headers=ASKED
        ) as stream,
    ):
        slow.told.put_nowait(0)
        assert await stream.get_final_text() == "Hello"
    slow.told.put_nowait(2)
    async with gateway.openai() as client_of_openai:
        events = await client_of_openai.responses.create(model=MODEL, input="Hi", stream=True, extra_headers=ASKED)
        slow.told.put_nowait(0)
        seen = [event async for event in events]
    assert seen[-1].type == "response.completed"
    numbers = [event.sequence_number for event in seen if not event.type.startswith("ryzanstein:")]
    assert numbers == list(range(len(numbers)))


async def test_the_websocket_of_responses_tells_it_where_its_handshake_asks(
    gateway: RunningGateway, slow: Slow
) -> None:
    address = gateway.websocket_url.replace("/v1/stream", "/v1/responses")
    for headers, found in ((ASKED, [{"processed": 2, "stream_id": "a"}]), ({}, [])):
        async with connect(address, additional_headers=headers) as socket:
            create = {"type": "response.create", "model": MODEL, "input": "Hi", "stream_id": "a"}
            slow.told.put_nowait(2)
            await socket.send(json.dumps(create))
            events = []
            while not events or not events[-1]["type"].startswith(("response.completed", "ryzanstein:")):
                events.append(json.loads(await socket.recv()))
                if events[-1]["type"] == "response.in_progress" and not found:
                    slow.told.put_nowait(0)
        told = [event for event in events if "prompt_progress" in event]
        assert [
            {"processed": event["prompt_progress"]["processed"], "stream_id": event["stream_id"]} for event in told
        ] == found
        if found:
            assert told[0]["sequence_number"] == events[-2]["sequence_number"]
            slow.told.put_nowait(0)


async def test_openai_s_client_passes_over_it(gateway: RunningGateway, slow: Slow) -> None:
    """It takes an empty line for an event, once it has seen an id."""
    slow.told.put_nowait(2)
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body={"return_progress": True}
        )
        slow.told.put_nowait(0)
        said = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(said) == "Hello"
        slow.told.put_nowait(2)
        events = await client.responses.create(model=MODEL, input="Hi", stream=True)
        slow.told.put_nowait(0)
        kinds = [event.type async for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


async def tell(ring: FakeRing, slow: Slow, computed: int) -> None:
    await until(lambda: ring.requests)
    slow.told.put_nowait(computed)


async def test_whoever_asks_for_it_reads_it_in_a_header_at_any_gateway(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, slow: Slow
) -> None:
    body = {"model": MODEL, "input": "Hi there", "background": True, "store": True}
    async with gateway.http() as http, other.http() as elsewhere:
        made = await http.post("/v1/responses", json=body)
        identity = made.json()["id"]
        assert PROGRESS not in made.headers
        await tell(ring, slow, 2)
        shown = f"2/{len(ring.requests[0].prompt)}"
        for client in (http, elsewhere):
            for path in (f"/v1/responses/{identity}", f"/v1/generations/{identity}"):

                async def told(client: httpx.AsyncClient = client, path: str = path) -> bool:
                    return (await client.get(path)).headers.get(PROGRESS) == shown

                await until(told)
        async with elsewhere.stream("GET", f"/v1/responses/{identity}?stream=true") as response:
            assert response.headers[PROGRESS] == shown
            lines = Lines(response)
            assert await lines.until(": prompt") == f": prompt {shown}"
            slow.told.put_nowait(0)
            assert any("response.completed" in line for line in await lines.rest())
        ended = await http.get(f"/v1/responses/{identity}")
        assert PROGRESS not in ended.headers


@pytest.mark.slow
async def test_a_ring_that_computes_a_prompt_has_not_failed(nats_settings: CommonSettings, ring: FakeRing) -> None:
    """A prompt that takes longer than a token may."""

    async def behave(fake: FakeRing, request: GenerationRequest) -> None:
        for computed in range(1, 9):
            await fake.emit(request, 0, [], computed=computed)
            await asyncio.sleep(0.25)
        await say(fake, request, "Hello")

    ring.behave = behave
    async with run_gateway(nats_settings, token_timeout=1.5) as running, running.http() as http:
        answer = await http.post(CHAT, json={"model": MODEL} | BODIES[CHAT])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


async def test_websockets_get_chunks_that_tell_it(gateway: RunningGateway, ring: FakeRing, slow: Slow) -> None:
    async with connect(gateway.websocket_url) as socket:
        request = {"model": MODEL, "return_progress": True} | BODIES[CHAT]
        await socket.send(json.dumps({"type": "generate", "id": "a", "request": request}))
        await tell(ring, slow, 3)
        first = json.loads(await socket.recv())
        assert (first["type"], first["position"]) == ("chunk", None)
        assert first["chunk"]["prompt_progress"]["processed"] == 3
        slow.told.put_nowait(0)
        types = []
        while not types or types[-1] != "done":
            types.append(json.loads(await socket.recv())["type"])
        assert set(types) == {"chunk", "done"}

"""What every endpoint that generates has, whoever's API it is: repeats that are paid once, rings that are made good,
sessions, limits in the API's own words, metrics by route, and a generation that its answer names."""

import struct
from typing import Any, NamedTuple

import httpx
import pytest

from services.gateway.api.dialect import PLAIN, Dialect, Dialects
from services.gateway.dialects.anthropic.dialect import ANTHROPIC
from services.gateway.dialects.ollama.dialect import OLLAMA
from services.gateway.dialects.registry import DIALECTS
from shared.keys import NewKey
from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.gateway.api.test_metrics import samples
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.auth.test_limits import bearer, make
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, stub_card, until

RERANKER = "reranker"
HELLO = [{"role": "user", "content": "Hi"}]
WHOLE: dict[str, Any] = {"stream": False, "options": {"num_predict": 8}}


class Endpoint(NamedTuple):
    path: str
    body: dict[str, Any]
    other: dict[str, Any]  # fields of another request
    named: str = "id"  # where the answer has the generation's id: a field, or a header

    prompts: int = 1  # requests at the ring

    @property
    def model(self) -> str:
        return str(self.body.get("model", MODEL))

    @property
    def dialect(self) -> Dialect:
        return Dialects(DIALECTS).of_path(self.path)


HEADER = "x-ryzanstein-generation"
GENERATING = (
    Endpoint("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8}, {"seed": 1}),
    Endpoint("/v1/completions", {"prompt": "Hi", "max_tokens": 8}, {"seed": 1}),
    Endpoint("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, {"input": "Ho"}),
    Endpoint("/v1/responses/compact", {"input": HELLO}, {"input": "Ho"}),
    Endpoint("/v1/embeddings", {"input": "Hi"}, {"input": "Ho"}, HEADER),
    Endpoint("/v1/messages", {"messages": HELLO, "max_tokens": 8}, {"temperature": 0.5}),
    Endpoint("/api/chat", {"messages": HELLO, **WHOLE}, {"options": {"seed": 1}}, HEADER),
    Endpoint("/api/generate", {"prompt": "Hi", **WHOLE}, {"options": {"seed": 1}}, HEADER),
    Endpoint("/api/embed", {"input": "Hi"}, {"input": "Ho"}, HEADER),
    Endpoint("/api/embeddings", {"prompt": "Hi"}, {"prompt": "Ho"}, HEADER),
    Endpoint("/v1/rerank", {"model": RERANKER, "query": "q", "documents": ["a", "b"]}, {"top_n": 1}, prompts=2),
    Endpoint("/v1/score", {"model": RERANKER, "text_1": "q", "text_2": "a"}, {"text_2": "b"}),
    Endpoint("/v1/classify", {"model": RERANKER, "input": "a"}, {"input": "b"}),
)


async def answer(ring: FakeRing, request: GenerationRequest) -> None:
    if not (request.embed or request.classify):
        await say(ring, request)
        return
    vector = struct.pack("<2f", 0.6, 0.8) if request.embed else struct.pack("<f", 1.0)
    await ring.emit(request, 0, [], finish="stop", vector=vector)


@pytest.fixture
async def ring(ring: FakeRing) -> FakeRing:
    """One that does everything, before there is a gateway."""
    await ring.add_model(stub_card(tasks=["generate", "embed"], embedding_size=2))
    await ring.add_model(stub_card(RERANKER, tasks=["classify"], labels=["relevant"], activation="sigmoid"))
    ring.behave = answer
    return ring


async def post(http: httpx.AsyncClient, endpoint: Endpoint, headers: Any = None, **more: Any) -> httpx.Response:
    return await http.post(endpoint.path, json={"model": MODEL} | endpoint.body | more, headers=headers)


def refused(answer: httpx.Response, endpoint: Endpoint) -> str:
    """The message of an error, which is in the endpoint's own shape."""
    told = answer.json()
    if endpoint.dialect is OLLAMA:
        assert list(told) == ["error"]
        return str(told["error"])
    if endpoint.dialect is ANTHROPIC:
        assert (told["type"], set(told["error"])) == ("error", {"type", "message"})
    else:
        assert endpoint.dialect is PLAIN
        assert set(told["error"]) == {"message", "type", "param", "code"}
    return str(told["error"]["message"])


def lasting(answer: httpx.Response) -> Any:
    """What an answer says but for durations, which are those of its reading."""
    assert answer.status_code == 200, answer.text
    return {name: given for name, given in answer.json().items() if not name.endswith("_duration")}


@pytest.mark.slow
async def test_a_repeat_is_paid_once_and_names_its_generation(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    async with gateway.http() as http, other.http() as elsewhere:
        await until_listed(elsewhere, RERANKER)
        for endpoint in GENERATING:
            key = {"Idempotency-Key": "once"}
            first = await post(http, endpoint, key)
            paid = len(ring.requests)
            for again in (http, elsewhere):
                assert lasting(await post(again, endpoint, key)) == lasting(first)
            assert len(ring.requests) == paid, endpoint.path
            wrong = await post(elsewhere, endpoint, key, **endpoint.other)
            assert wrong.status_code == 422
            assert "another request body" in refused(wrong, endpoint)
            name = first.headers[HEADER] if endpoint.named == HEADER else first.json()["id"]
            state = (await elsewhere.get(f"/v1/generations/{name}")).json()
            assert (state["status"], state["model"]) == ("completed", endpoint.model), endpoint.path


async def test_a_lost_ring_is_made_good_and_counted_by_the_route(http: httpx.AsyncClient, ring: FakeRing) -> None:
    async def die_once(fake: FakeRing, request: GenerationRequest) -> None:
        if request.attempt:
            await answer(fake, request)
            return
        await fake.emit(request, 0, [])
        begun.append(request.generation_id)
        if len(begun) == endpoint.prompts:
            await fake.lose()

    ring.behave = die_once
    for endpoint in GENERATING:
        ring.requests.clear()
        begun = list[str]()
        lasting(await post(http, endpoint))
        assert [request.attempt for request in ring.requests] == [*[0] * endpoint.prompts, *[1] * endpoint.prompts], (
            endpoint.path
        )
        counted = {"route": endpoint.path, "model": endpoint.model, "status": "200"}
        await until(lambda told=counted: has(http, told))


async def has(http: httpx.AsyncClient, labels: dict[str, str]) -> bool:
    return ("ryzanstein_gateway_requests_total", frozenset(labels.items())) in await samples(http)


async def test_a_session_is_the_same_at_every_gateway(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    async with gateway.http() as http, other.http() as elsewhere:
        await until_listed(elsewhere, RERANKER)
        sessions = set()
        for endpoint in GENERATING:
            for client in (http, elsewhere):
                lasting(await post(client, endpoint, {"X-Session-ID": "mine"}))
            sessions |= {request.session for request in ring.requests}
            ring.requests.clear()
            assert len(sessions) == 1, endpoint.path
        assert "" not in sessions


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_limits_are_told_in_each_apis_words(http: httpx.AsyncClient, bus: Bus, limit: str) -> None:
    for endpoint in GENERATING:
        large = await make(bus, tokens_per_minute=100_000)
        await until(lambda told=large: gateway_knows(http, told))
        cost = 100_000 - int((await post(http, endpoint, bearer(large))).headers["x-ratelimit-remaining-tokens"])
        key = await make(bus, **{limit: 1 if limit == "requests_per_minute" else cost})
        await until(lambda told=key: gateway_knows(http, told))
        lasting(await post(http, endpoint, bearer(key)))
        late = await post(http, endpoint, bearer(key))
        assert late.status_code == 429, endpoint.path
        assert "Please try again in" in refused(late, endpoint)
        assert 1 <= int(late.headers["retry-after"]) <= 62
        nobody = await post(http, endpoint)
        assert (nobody.status_code, "API key" in refused(nobody, endpoint)) == (401, True)


async def gateway_knows(http: httpx.AsyncClient, key: NewKey) -> bool:
    """Not where it lets everybody in, since it has read of no key yet."""
    stranger = await http.get("/v1/models")
    return stranger.status_code == 401 and (await http.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_what_generates_nothing_is_refused_and_counted_alike(http: httpx.AsyncClient, bus: Bus) -> None:
    line = {"custom_id": "a", "params": {"model": MODEL, "messages": HELLO, "max_tokens": 8}}
    file = {"filename": "a.txt", "purpose": "user_data", "bytes": 1, "mime_type": "text/plain"}
    messages = {"model": MODEL, "messages": HELLO}
    for endpoint in (
        Endpoint("/v1/messages/count_tokens", messages, {}),
        Endpoint("/v1/responses/input_tokens", {"model": MODEL, "input": "Hello"}, {}),
        Endpoint("/v1/messages/batches", {"requests": [line]}, {}),
        Endpoint("/v1/conversations", {}, {}),
        Endpoint("/v1/uploads", file, {}),
    ):
        key = await make(bus, requests_per_minute=1)
        await until(lambda told=key: gateway_knows(http, told))
        made = await http.post(endpoint.path, json=endpoint.body, headers=bearer(key))
        assert made.status_code == 200, made.text
        nobody = await http.post(endpoint.path, json=endpoint.body)
        assert (nobody.status_code, "API key" in refused(nobody, endpoint)) == (401, True)
        labels = {"route": endpoint.path, "model": "", "status": "200"}
        await until(lambda told=labels: has(http, told))
        late = await http.post(endpoint.path, json=endpoint.body, headers=bearer(key))
        assert late.status_code == 429, endpoint.path
        assert "Please try again in" in refused(late, endpoint)
        assert 1 <= int(late.headers["retry-after"]) <= 62


async def test_what_reads_a_tenants_entries_is_counted(http: httpx.AsyncClient, bus: Bus) -> None:
    """Whether there are any or not."""
    for path in [
        "/v1/files",
        "/v1/batches",
        "/v1/messages/batches",
        "/v1/fine_tuning/jobs",
        "/v1/fine_tuning/jobs/ftjob-1/events",
        "/v1/chat/completions",
        "/v1/chat/completions/chatcmpl-1/messages",
        "/v1/conversations/conv_1/items",
        "/v1/conversations/conv_1/items/msg_1",
        "/v1/responses/resp_1/input_items",
    ]:
        key = await make(bus, requests_per_minute=1)
        await until(lambda told=key: gateway_knows(http, told))
        assert (await http.get(path, headers=bearer(key))).status_code in (200, 404)
        assert (await http.get(path, headers=bearer(key))).status_code == 429

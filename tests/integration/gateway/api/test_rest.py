"""Chat completions and completions over HTTP, as the official client and curl see them."""

import asyncio
import json
import re

import httpx
import openai
import pytest

from services.gateway.api.openapi.operation import ApiRoute
from services.gateway.intake.prompts.kv_cache import cache_key, session_of
from services.gateway.lifecycle.request_state import seed_of_choice
from shared.messages import GenerationRequest
from shared.process import VERSION
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, stub_card, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": HELLO} | fields


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [
        line.removeprefix("data: ")
        for event in text.split("\n\n")
        for line in event.splitlines()
        if line.startswith("data: ")
    ]


async def test_a_chat_is_answered_whole(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=20, seed=-1)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 13, 16)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3  # never more than the prompt has
    request = ring.requests[0]
    assert bytes(request.prompt) == b"Hi\n"
    assert request.max_tokens == 20
    assert request.stop_token_ids == [0]
    assert request.sampling.seed == 2**64 - 1
    assert request.session.startswith(session_of("", "auto-"))


async def test_a_chat_is_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, world!"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_stream_is_server_sent_events_with_positions(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json=body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = events(answer.text)
    assert data[-1] == "[DONE]"
    assert "usage" not in json.loads(data[0])
    ids = [int(line[4:]) for line in answer.text.splitlines() if line.startswith("id: ")]
    assert ids == sorted(ids)
    assert ids[-1] == 15  # the end of the text and the end of the choice count as one position each


async def test_completions_take_text_tokens_and_lists(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Once", max_tokens=5)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    answer = await client.completions.create(model=MODEL, prompt=[[72, 105], [72]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 4 * 13
    prompts = sorted(request.prompt for request in ring.requests[1:])
    assert prompts == [[72], [72], [72, 105], [72, 105]]
    assert ring.requests[1].max_tokens == 16  # OpenAI's default for this endpoint
    stream = await client.completions.create(model=MODEL, prompt=[72, 105], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world!"


async def test_choices_are_interleaved_and_have_seeds_of_their_own(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7, stream=True)
    texts, roles = {0: "", 1: "", 2: ""}, []
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
    assert set(texts.values()) == {"Hello, world!"}
    assert sorted(roles) == [0, 1, 2]
    seeds = {request.generation_id[-1]: request.sampling.seed for request in ring.requests}
    assert seeds == {str(choice): seed_of_choice(7, choice) for choice in range(3)}
    assert len({request.request_id for request in ring.requests}) == 1


async def test_a_stop_string_cuts_the_text_and_ends_the_work(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def endless(fake: FakeRing, request: object) -> None:
        for position, token in enumerate(b"one two three"):
            await fake.emit(ring.requests[-1], position, [token])

    ring.behave = endless
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, stop=["two", "zzz"])
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    identity = ring.requests[0].generation_id
    await until(lambda: identity in ring.commanded)


async def test_logprobs_of_both_endpoints(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=5
    )
    logprobs = chat.choices[0].logprobs
    assert [item.token for item in logprobs.content] == list("Hello")
    assert logprobs.content[0].bytes == [72]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["a", "b"]
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stop="lo", stream=True)
    shown = [
        item.token
        async for chunk in stream
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content or []
    ]
    assert shown == list("Hel")  # nothing of the stop string
    plain = await client.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=3)
    found = plain.choices[0].logprobs
    assert found.tokens == ["H", "e", "l"]
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs == [{"H": -0.5, "a": -1.0}, {"e": -0.5, "a": -1.0}, {"l": -0.5, "a": -1.0}]


async def test_model_defaults_hold_where_a_field_is_absent(http: httpx.AsyncClient, ring: FakeRing) -> None:
    await ring.add_model(stub_card("tuned", defaults={"temperature": 0.25, "top_k": 7, "do_sample": True}))
    await until_listed(http, "tuned")
    await http.post(CHAT, json=body(model="tuned", top_p=0.5))
    await http.post(CHAT, json=body(model="tuned", temperature=0, top_k=-1))
    first, second = (request.sampling for request in ring.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 7, 0.5)
    assert (second.temperature, second.top_k, second.top_p) == (0.0, 0, 1.0)


async def until_listed(http: httpx.AsyncClient, model: str) -> None:
    for _ in range(1000):
        if (await http.get(f"/v1/models/{model}")).status_code == 200:
            return
    pytest.fail(f"{model} was not listed")


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == [MODEL]
    assert (await client.models.retrieve(MODEL)).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await client.models.retrieve("nobody")


async def test_vllms_small_endpoints_answer(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": VERSION}
    assert (await http.get("/load")).json() == {"server_load": 0}
    assert [(await http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
    nothing = await http.get("/v1/nothing")
    assert "/openapi.json" in nothing.json()["error"]["message"]
    for path in ("/health", "/version"):
        refused = await http.delete(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
        assert refused.headers["allow"]


async def test_a_slash_behind_a_path_means_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.post(f"{CHAT}/", json=body())).json()["object"] == "chat.completion"
    for path in ("/health", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/api/tags"):
        plain, slashed = await http.get(path), await http.get(f"{path}/")
        assert (plain.status_code, slashed.status_code) == (200, 200), path
        assert slashed.headers["content-type"] == plain.headers["content-type"]
    assert (await http.get("/v1/nothing/")).json()["error"]["code"] == "unknown_url"


async def test_every_path_says_which_methods_it_takes_in_the_shape_of_its_api(
    gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    routes = [route for route in gateway.service._app.routes if isinstance(route, ApiRoute)]
    paths = {re.sub(r"\{.*?\}", "x", route.path) for route in routes}
    assert len(paths) > 80
    for path in paths:
        for method in ("OPTIONS", "TRACE"):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.headers["allow"] != "") == (405, True), path
            told = answer.json()["error"]
            if path.startswith("/api/"):
                assert "allowed: " in told
            elif path.startswith("/v1/messages"):
                assert told["type"] == "invalid_request_error"
            else:
                assert told["code"] == "method_not_allowed"


async def test_what_is_listed_is_what_is_served(
    http: httpx.AsyncClient, gateway: RunningGateway, ring: FakeRing
) -> None:
    async def listed(*expected: str) -> None:
        catalog = gateway.service._backend.started.catalog
        await until(lambda: [card.model for card in catalog.listed()] == list(expected))
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == list(expected)

    await ring.add_model(stub_card("another"))
    await listed("another", MODEL)  # no group at all is up: both may come back
    await ring.put_record("gone", model="another")  # of an earlier start
    await listed(MODEL)
    await ring.put_record("starting")
    await until(lambda: not gateway.service._backend.started.catalog.listed())
    (loading,) = (await http.get("/v1/models")).json()["data"]
    assert (loading["id"], loading["status"]["value"]) == (MODEL, "loading")
    for state in ("ready", "starting", "busy", "hung", "draining"):
        await ring.put_record(state)
        await listed(MODEL)
    assert (await http.get("/v1/models/another")).status_code == 404
    answer = await http.post(CHAT, json=body(model="another"))  # of an earlier start: nobody will ever serve it
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert f"the models are: {MODEL}." in (await http.get("/v1/models/nobody")).json()["error"]["message"]
    await ring.put_record("gone")  # it may come back
    await listed(MODEL)


async def test_what_other_servers_have_and_this_one_has_not_says_why(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/moderations", json={"input": "Hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert "/v1/classify" in error["message"]
    for path, instead in (("/v2/chat", "/v1/chat/completions"), ("/v2/embed", "/v1/embeddings")):
        answer = await http.post(path, json={"model": MODEL})
        assert answer.status_code == 404
        assert answer.json().keys() == {"id", "message"}, "as Cohere tells errors"
        assert answer.json()["id"] == answer.headers["x-request-id"]
        assert instead in answer.json()["message"]


async def test_ids_of_requests_and_sessions_reach_the_ring(http: httpx.AsyncClient, ring: FakeRing) -> None:
    headers = {"x-request-id": "trace-1", "X-Session-ID": "a session"}
    answer = await http.post(CHAT, json=body(prompt_cache_key="other"), headers=headers)
    assert answer.headers["x-request-id"] == "trace-1"
    assert ring.requests[0].request_id == "trace-1"
    assert ring.requests[0].session == session_of("", "a session")
    answer = await http.post(CHAT, json=body(prompt_cache_key="other"))
    assert answer.headers["x-request-id"].startswith("req-")
    assert ring.requests[1].session == session_of("", cache_key("other"))
    turns = [*HELLO, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    for messages in (HELLO, turns):
        await http.post(CHAT, json=body(messages=messages))
    assert ring.requests[2].session == ring.requests[3].session


async def test_what_benchmarks_send_is_taken(http: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await http.post(
        CHAT, json=body(ignore_eos=True, min_tokens=5, max_tokens=5, temperature=0, user="u", metadata={}, tools=[])
    )
    assert answer.status_code == 200
    assert ring.requests[0].stop_token_ids == []


async def test_a_stop_token_is_counted_and_not_shown(http: httpx.AsyncClient, ring: FakeRing) -> None:
    async def behave(fake: FakeRing, request: object) -> None:
        await fake.emit(ring.requests[-1], 0, list(b"ab!"), finish="stop")

    ring.behave = behave
    answer = (await http.post(CHAT, json=body(stop_token_ids=[ord("!")]))).json()
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["usage"]["completion_tokens"] == 3


async def test_operations_endpoints_are_on_the_same_port(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=body())
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).json()["ready"] is True
    metrics = (await http.get("/metrics")).text
    line = f'ryzanstein_gateway_requests_total{{model="{MODEL}",route="{CHAT}",status="200"}} 1.0'
    assert line in metrics
    assert f'ryzanstein_gateway_output_tokens_total{{model="{MODEL}"}} 13.0' in metrics
    assert f'ryzanstein_gateway_first_token_seconds_count{{model="{MODEL}"}} 1.0' in metrics
    assert f'ryzanstein_gateway_between_tokens_seconds_count{{model="{MODEL}"}} 12.0' in metrics


async def test_the_time_between_tokens_is_that_of_one_choice(http: httpx.AsyncClient, ring: FakeRing) -> None:
    """Two choices whose tokens alternate, one token each second, say: two seconds lie between two of one."""
    meeting = asyncio.Barrier(2)

    async def in_turn(fake: FakeRing, request: GenerationRequest) -> None:
        for position in range(3):
            await meeting.wait()
            await fake.emit(request, position, [65])
        await fake.emit(request, 3, [], finish="stop")

    ring.behave = in_turn
    await http.post(CHAT, json=body(n=2))
    metrics = (await http.get("/metrics")).text
    assert f'ryzanstein_gateway_first_token_seconds_count{{model="{MODEL}"}} 1.0' in metrics
    assert f'ryzanstein_gateway_between_tokens_seconds_count{{model="{MODEL}"}} 4.0' in metrics


async def test_many_at_once(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = saying("A rather longer answer than the others have.")
    async with gateway.openai() as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=HELLO) for _ in range(50))
        )
    assert {answer.choices[0].message.content for answer in answers} == {"A rather longer answer than the others have."}

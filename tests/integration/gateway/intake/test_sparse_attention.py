"""Sparse attention from every API to the ring, and back in what is told of it."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import websockets.asyncio.client

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from shared.messages import GroupLoad, GroupRecord, GroupTraits, SparseAttention
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.api.grpc.conftest import Client
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.api.test_websocket import Socket
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import FakeRing, halting, stub_card, until

LONG, PLAIN, WINDOWED = "org/long", "org/plain", "org/windowed"
CHOICE = {"threshold": 64, "sinks": 16, "recent": 32, "budget": 48}
SPARSE = SparseAttention(**CHOICE)  # type: ignore[arg-type]
PROMPT = "x" * 100
SAID = [{"role": "user", "content": PROMPT}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": LONG, "prompt": PROMPT, "max_tokens": 16}


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    """With models that can choose pages, windows, and nothing."""
    for name, kinds in ((LONG, ["pages", "window"]), (WINDOWED, ["window"]), (PLAIN, [])):
        await ring.add_model(stub_card(name, sparse=kinds, page_tokens=16))
    async with run_gateway(nats_settings, grpc_port=0) as running, running.http() as http:
        for name in (LONG, WINDOWED, PLAIN):
            await until_listed(http, name)
        yield running


async def posted(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json={"model": LONG} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_every_api_hands_the_choice_on_and_tells_what_was_sparse(
    gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    """13 tokens of output behind 100 of the prompt, and two of the chat's form, of which 64 read everything."""
    field = {"sparse_attention": CHOICE}
    plain = await posted(http, COMPLETIONS, prompt=PROMPT, **field)
    usage = plain["usage"]
    assert usage["prompt_tokens_details"]["sparse_tokens"] == 36
    assert usage["completion_tokens_details"]["sparse_tokens"] == usage["completion_tokens"] == 13
    chat = (await posted(http, CHAT, messages=SAID, **field))["usage"]
    beyond = chat["prompt_tokens"] - 64
    assert chat["prompt_tokens_details"]["sparse_tokens"] == beyond
    response = (await posted(http, "/v1/responses", input=PROMPT, **field))["usage"]
    assert response["input_tokens_details"]["sparse_tokens"] == response["input_tokens"] - 64
    assert response["output_tokens_details"]["sparse_tokens"] == 13
    message = (await posted(http, "/v1/messages", messages=SAID, max_tokens=32, **field))["usage"]
    assert message["input_tokens_details"] == {"sparse_tokens": beyond}
    assert message["output_tokens_details"]["sparse_tokens"] == 13
    ollama = await posted(http, "/api/chat", messages=SAID, stream=False, options=field)
    assert (ollama["prompt_eval_sparse_count"], ollama["eval_sparse_count"]) == (beyond, 13)
    async with Client(gateway.service.grpc_address) as client:
        asked = pb.SparseAttention(threshold=64, sinks=16, recent=32, budget=48)
        asks = pb.GenerateRequest(model=LONG, text=PROMPT, sparse_attention=asked)
        events = [event async for event in client.Generate(asks)]
    assert (events[-1].usage.sparse_prompt_tokens, events[-1].usage.sparse_completion_tokens) == (36, 13)
    async with websockets.asyncio.client.connect(gateway.websocket_url) as socket:
        talk = Socket(socket)
        await talk.send(type="generate", id="a", endpoint="completions", request=BODY | field)
        assert (await talk.until_end())["a"][-1]["type"] == "done"
    assert [request.sparse for request in ring.requests] == [SPARSE] * 7
    metrics = (await http.get("/metrics")).text
    assert f'ryzanstein_gateway_sparse_tokens_total{{model="{LONG}"}}' in metrics


async def test_short_texts_and_those_that_do_not_ask_say_nothing_of_it(http: httpx.AsyncClient, ring: FakeRing) -> None:
    for field in ({}, {"sparse_attention": False}, {"sparse_attention": True}):
        usage = (await posted(http, COMPLETIONS, prompt=PROMPT, **field))["usage"]
        assert "sparse_tokens" not in usage["prompt_tokens_details"] | usage["completion_tokens_details"]
    assert [request.sparse for request in ring.requests] == [None, None, SparseAttention()]


async def test_grpc_has_every_way_of_saying_it(gateway: RunningGateway, ring: FakeRing) -> None:
    window = pb.SparseAttention(kind=pb.SPARSE_KIND_WINDOW, share=0.5, dense_layers=0)
    ways = [pb.SparseAttention(), window, pb.SparseAttention(off=True)]
    said = [pb.ChatMessage(role=pb.ROLE_USER, content=PROMPT)]
    async with Client(gateway.service.grpc_address) as client:
        for way in ways:
            asked = pb.ChatRequest(model=LONG, messages=said, sparse_attention=way)
            [event async for event in client.Chat(asked)]
        for wrong, words in (
            (pb.SparseAttention(off=True, recent=3), r"sparse_attention\.off.*'recent'"),
            (pb.SparseAttention(kind=9), r"Supported values of 'sparse_attention\.kind'"),  # type: ignore[arg-type]
            (pb.SparseAttention(share=math.nan), r"'sparse_attention\.share': it is not a number"),
        ):
            asked = pb.ChatRequest(model=LONG, messages=said, sparse_attention=wrong)
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await anext(aiter(client.Chat(asked)))
    expected = [SparseAttention(), SparseAttention("window", share=0.5, dense_layers=0), None]
    assert [request.sparse for request in ring.requests] == expected


async def test_what_cannot_be_done_is_refused_in_a_sentence(http: httpx.AsyncClient, ring: FakeRing) -> None:
    for model, field, param, words in [
        (LONG, {"kind": "best"}, "sparse_attention.kind", "'pages', 'window'"),
        (LONG, {"budget": 15}, "sparse_attention.budget", "15, below one page of 16 tokens"),
        (LONG, {"sinks": -1}, "sparse_attention.sinks", "minimum value"),
        (LONG, {"share": 1.01}, "sparse_attention.share", "maximum value"),
        (LONG, {"threshold": 512}, "sparse_attention.threshold", "below the 1,088 tokens"),
        (LONG, {"page": 3}, "sparse_attention.page", "Unknown parameter"),
        (LONG, "on", "sparse_attention", "expected one of"),
        (WINDOWED, True, "sparse_attention", "ask for kind 'window'"),
        (PLAIN, True, "sparse_attention", "org/plain cannot"),
        (PLAIN, {"kind": "window"}, "sparse_attention", "leave it out"),
    ]:
        for path, body in ((COMPLETIONS, {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
            answer = await http.post(path, json={"model": model, "sparse_attention": field} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert words in error["message"]
        options = {"model": model, "prompt": "x", "options": {"sparse_attention": field}}
        told = await http.post("/api/generate", json=options)
        assert told.status_code == 400
        assert f"options.{param}" in told.json()["error"]
        assert ring.requests == []


async def test_a_models_entry_is_how_its_requests_attend(
    hosts: FakeHosts, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    choice = SparseAttention("window", 64, 16, 32)
    for name in (LONG, PLAIN):
        await hosts.register(name, sparse_attention=choice)
    ways: list[dict[str, Any]] = [
        {},
        {"sparse_attention": True},
        {"sparse_attention": {"recent": 48}},
        {"sparse_attention": False},
    ]
    for _ in range(1000):
        await posted(http, COMPLETIONS, prompt="x")
        if ring.requests[-1].sparse is not None:
            break
    else:
        pytest.fail("the gateway has not read the entry")
    ring.requests.clear()
    for way in ways:
        await posted(http, COMPLETIONS, prompt="x", **way)
    await posted(http, COMPLETIONS, prompt="x", model=PLAIN)
    other = SparseAttention("window", 64, 16, 48)
    assert [request.sparse for request in ring.requests] == [choice, choice, other, None, None]


async def test_groups_of_one_model_may_differ(hosts: FakeHosts, http: httpx.AsyncClient, ring: FakeRing) -> None:
    """Who asks for pages gets them of the group that keeps summaries; who says nothing may go to any."""
    await hosts.register(WINDOWED, sparse_attention=SPARSE)
    records = await Bucket.open(ring.bus, subjects.GROUPS_BUCKET, GroupRecord)
    for name, kinds in (("with", ["pages", "window"]), ("without", ["window"])):
        record = GroupRecord(name, WINDOWED, "ready", 1, [], GroupLoad(), traits=GroupTraits(kinds))  # type: ignore[arg-type]
        await records.put(name, record)

    async def offered() -> bool:
        models = (await http.get("/v1/models")).json()["data"]
        return ["pages", "window"] in [model["sparse_attention"] for model in models]

    await until(offered)
    for way in ({}, {"sparse_attention": True}, {"sparse_attention": {"kind": "window"}}):
        await posted(http, COMPLETIONS, prompt="x", model=WINDOWED, **way)
    assert [request.sparse and request.sparse.kind for request in ring.requests] == [None, "pages", "window"]
    await records.delete("without")

    async def unasked() -> bool:
        await posted(http, COMPLETIONS, prompt="x", model=WINDOWED)
        return ring.requests[-1].sparse == SPARSE

    await until(unasked)


async def test_a_lost_ring_or_a_repeat_changes_nothing(
    http: httpx.AsyncClient, ring: FakeRing, nats_settings: CommonSettings
) -> None:
    began = asyncio.Event()

    async def begin(fake: FakeRing) -> None:
        began.set()

    ring.behave = halting(begin)
    key = {"Idempotency-Key": "long"}
    body = BODY | {"sparse_attention": CHOICE}
    asking = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=key))
    await began.wait()
    await ring.die()
    ring.resume()
    answer = (await asking).json()
    assert answer["choices"][0]["text"] == "Hello, world!"
    assert [(request.attempt, request.sparse) for request in ring.requests] == [(0, SPARSE), (1, SPARSE)]
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        assert (await theirs.post(COMPLETIONS, json=body, headers=key)).json() == answer
        dense = await theirs.post(COMPLETIONS, json=BODY, headers=key)
        assert (dense.status_code, dense.json()["error"]["code"]) == (422, "idempotency_key_reused")
    await until(lambda: len(ring.requests) == 2)


@pytest.mark.parametrize("choice", [CHOICE, {"kind": "window"}, {"budget": 16, "share": 0.01}])
async def test_a_prompt_beyond_the_context_is_refused_however_little_it_would_read(
    http: httpx.AsyncClient, ring: FakeRing, choice: dict[str, Any]
) -> None:
    body = BODY | {"prompt": "x" * 2100, "sparse_attention": choice, "return_progress": True, "stream": True}
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert "2100" in error["message"]
    assert ring.requests == []

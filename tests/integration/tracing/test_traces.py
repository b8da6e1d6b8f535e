"""One request through gateway, scheduler and ring, as a real collector sees it."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
from typing import Any

import grpc
import httpx
import pytest
import websockets

from services.gateway.api.grpc.generated import inference_pb2 as pb
from tests.integration.gateway.api.test_endpoints import GENERATING, HEADER
from tests.integration.gateway.fake_ring import until
from tests.integration.rollout.cluster_fixture import House, until_answered
from tests.otlp import Collector, ReceivedSpan

pytestmark = pytest.mark.asyncio(loop_scope="package")

CLIENT = "b7ad6b7169203331"


def new_trace() -> str:
    return secrets.token_hex(16)


async def ask(house: House, traceparent: str | None, **body: Any) -> httpx.Response:
    given = {"model": "stub", "prompt": "one two three", "max_tokens": 4, "seed": 1} | body
    headers = {"x-request-id": "the-request"}
    if traceparent is not None:
        headers |= {"traceparent": traceparent, "tracestate": "other=1"}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(f"{house.url('gateway-0')}/v1/completions", json=given, headers=headers)


async def spans_of(received: Collector, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
    """Those of a trace by name, once all of `names` have come."""
    await asyncio.to_thread(
        received.wait_for, lambda spans: {span.name for span in spans if span.trace_id == trace_id}.issuperset(names)
    )
    return {span.name: span for span in received.of(trace_id)}


async def test_a_request_is_one_trace_from_the_client_to_the_ranks(house: House, received: Collector) -> None:
    trace_id = new_trace()
    choice = {"kind": "window", "recent": 512}
    answer = await ask(house, f"00-{trace_id}-{CLIENT}-01", sparse_attention=choice)
    assert answer.status_code == 200
    expected_parents = {
        "POST /v1/completions": "",
        "prepare": "POST /v1/completions",
        "tokenize": "prepare",
        "text_completion stub": "POST /v1/completions",
        "send intake.interactive": "text_completion stub",
        "process intake.interactive": "send intake.interactive",
        "wait": "process intake.interactive",
        "place": "process intake.interactive",
        "dispatch group-0": "process intake.interactive",
        "generate group-0": "dispatch group-0",
        "queue": "generate group-0",
        "prefill": "generate group-0",
        "decode": "generate group-0",
        "rank 0": "generate group-0",
        "rank 1": "generate group-0",
        "deliver": "POST /v1/completions",
    }
    spans = await spans_of(received, trace_id, *expected_parents)
    assert set(spans) == set(expected_parents)
    for name, parent in expected_parents.items():
        assert spans[name].parent_id == (spans[parent].span_id if parent else CLIENT), name
        assert spans[name].state == "other=1"
        assert spans[name].begin <= spans[name].end
    root = spans["POST /v1/completions"]
    assert answer.headers["traceresponse"] == f"00-{trace_id}-{root.span_id}-01"
    assert (root.kind, root.attributes["http.response.status_code"]) == (2, 200)
    assert root.resource["service.name"] == "ryzanstein-gateway"
    assert root.resource["service.instance.id"] == "gateway-0"
    generation = spans["text_completion stub"]
    assert generation.attributes["gen_ai.request.model"] == "stub"
    assert generation.attributes["gen_ai.usage.input_tokens"] == len("one two three")
    assert generation.attributes["gen_ai.usage.output_tokens"] == 4
    assert generation.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert generation.attributes["ryzanstein.sparse_attention"] == "window,recent=512"
    assert generation.events == ["gen_ai.first_token"]
    ring = spans["generate group-0"]
    assert ring.resource["ryzanstein.group"] == "group-0"
    assert ring.attributes["ryzanstein.epoch"] == spans["dispatch group-0"].attributes["ryzanstein.epoch"]
    assert ring.attributes["ryzanstein.attempt"] == 0
    assert ring.attributes["ryzanstein.request_id"] == "the-request"
    assert spans["prefill"].events == ["chunk"]
    assert spans["decode"].attributes["ryzanstein.steps"] == 3, "the prompt's last step gives the first token"
    for rank in range(2):
        assert spans[f"rank {rank}"].attributes["ryzanstein.rank"] == rank
        assert spans[f"rank {rank}"].attributes["ryzanstein.steps"] == 4
    logged = [json.loads(line) for line in house.logs("*.log").splitlines() if "the-request" in line]
    about = {line["event"]: line for line in logged}
    assert set(about) >= {"request", "dispatched", "accepted", "finished"}
    assert {line.get("trace_id") for line in logged} == {trace_id}
    assert about["request"]["span_id"] == root.span_id
    assert about["accepted"]["sparse_attention"] == "window,recent=512"
    assert about["finished"]["span_id"] == ring.span_id
    assert (about["finished"]["group"], about["finished"]["rank"], about["finished"]["attempt"]) == ("group-0", 0, 0)


@pytest.mark.parametrize(
    "header", ["nonsense", f"00-{'0' * 32}-{CLIENT}-01", f"ff-{'a' * 32}-{CLIENT}-01", f"00-{'A' * 32}-{CLIENT}-01"]
)
async def test_a_malformed_traceparent_is_as_none(house: House, received: Collector, header: str) -> None:
    answer = await ask(house, header)
    assert answer.status_code == 200
    trace_id = answer.headers["traceresponse"].split("-")[1]
    spans = await spans_of(received, trace_id, "POST /v1/completions")
    assert spans["POST /v1/completions"].parent_id == "", "a trace of its own"


async def test_what_is_not_sampled_leaves_nothing(house: House, received: Collector) -> None:
    unsampled, sampled = new_trace(), new_trace()
    answer = await ask(house, f"00-{unsampled}-{CLIENT}-00")
    assert answer.status_code == 200
    assert "traceresponse" not in answer.headers
    await ask(house, f"00-{sampled}-{CLIENT}-01")
    await spans_of(received, sampled, "POST /v1/completions", "generate group-0", "process intake.interactive")
    assert received.of(unsampled) == []


@pytest.mark.slow
async def test_a_lost_ring_gives_a_second_attempt_in_the_same_trace(house: House, received: Collector) -> None:
    trace_id = new_trace()
    asked = asyncio.create_task(ask(house, f"00-{trace_id}-{CLIENT}-01", max_tokens=400))
    await spans_of(received, trace_id, "prefill")
    lost = house.group("executor-0")
    os.kill(lost.ranks[1].pid, signal.SIGKILL)
    assert (await asked).json()["usage"]["completion_tokens"] == 400
    wanted = ("send intake.recovery", "process intake.recovery", "decode", "rank 1", "text_completion stub")
    spans = await spans_of(received, trace_id, *wanted)
    generation = spans["text_completion stub"]
    first, second = spans["send intake.interactive"], spans["send intake.recovery"]
    assert "recovering" in generation.events
    assert first.parent_id == second.parent_id == generation.span_id
    assert second.links == [(trace_id, first.span_id)]
    assert second.attributes["ryzanstein.attempt"] == 1
    attempts = [span for span in received.of(trace_id) if span.name == "generate group-0"]
    last = max(attempts, key=lambda span: span.begin)
    assert last.attributes["ryzanstein.attempt"] == 1
    assert last.attributes["ryzanstein.epoch"] > lost.epoch
    queues = [span for span in received.of(trace_id) if span.name == "queue"]
    assert len(queues) == 2, "what the lost ring had ended before is here, too"
    assert not generation.failed


async def test_websocket_and_grpc_and_batch_lines_are_traced(house: House, received: Collector) -> None:
    handshake, message = new_trace(), new_trace()
    address = house.url("gateway-0").removeprefix("http://")
    headers = {"traceparent": f"00-{handshake}-{CLIENT}-01"}
    body = {"model": "stub", "prompt": "x", "max_tokens": 2}
    async with websockets.connect(f"ws://{address}/v1/stream", additional_headers=headers) as socket:
        own: dict[str, Any] = {"traceparent": f"00-{message}-{CLIENT}-01"}
        for name, more in {"a": {}, "b": own, "c": {"traceparent": 5, "tracestate": []}}.items():
            told = {"type": "generate", "id": name, "endpoint": "completions", "request": body} | more
            await socket.send(json.dumps(told))
        done = 0
        while done < 3:
            heard = json.loads(await socket.recv())
            assert heard["type"] in ("chunk", "done"), heard
            done += heard["type"] == "done"
    for trace_id in (handshake, message):
        spans = await spans_of(received, trace_id, "generate /v1/stream", "generate group-0", "deliver")
        assert spans["generate /v1/stream"].parent_id == CLIENT

    called = new_trace()
    target = house.processes["gateway-0"].beats[-1].grpc_address
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_stream(
            "/ryzanstein.v1.InferenceService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=bytes,
        )(
            pb.GenerateRequest(model="stub", text="x", sampling=pb.SamplingParameters(max_tokens=2)),
            metadata=[("traceparent", f"00-{called}-{CLIENT}-01")],
        )
        assert [answer async for answer in call]
    method = "ryzanstein.v1.InferenceService/Generate"
    spans = await spans_of(received, called, method, "generate group-0", "deliver")
    assert spans[method].parent_id == CLIENT
    assert spans[method].attributes["rpc.response.status_code"] == "OK"

    created = new_trace()
    line = {"custom_id": "l", "method": "POST", "url": "/v1/completions", "body": body}
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        file = {"file": ("in.jsonl", json.dumps(line).encode())}
        uploaded = await http.post("/v1/files", data={"purpose": "batch"}, files=file)
        wanted = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        given = {"traceparent": f"00-{created}-{CLIENT}-01"}
        assert (await http.post("/v1/batches", json=wanted, headers=given)).status_code == 200
    root = (await spans_of(received, created, "POST /v1/batches"))["POST /v1/batches"]
    await asyncio.to_thread(
        received.wait_for, lambda spans: any((created, root.span_id) in span.links for span in spans)
    )
    line_span = next(span for span in received.spans if (created, root.span_id) in span.links)
    assert line_span.name == "line /v1/completions"
    assert line_span.trace_id != created
    await spans_of(received, line_span.trace_id, "process intake.batch", "generate group-0", "decode")


@pytest.mark.slow
async def test_every_endpoint_is_traced_to_its_ring(house: House, received: Collector) -> None:
    kinds = {"/v1/completions": "text_completion", "/api/generate": "text_completion"} | {
        f"/v1/{name}": name for name in ("embeddings", "rerank", "score", "classify")
    }
    kinds |= dict.fromkeys(("/api/embed", "/api/embeddings"), "embeddings")
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        traces = [new_trace() for _ in GENERATING]
        asked = (
            http.post(
                endpoint.path,
                json=endpoint.body | {"model": "stub"},
                headers={"traceparent": f"00-{trace_id}-{CLIENT}-01"},
            )
            for endpoint, trace_id in zip(GENERATING, traces, strict=True)
        )
        answers = await asyncio.gather(*asked)
    for endpoint, trace_id, answer in zip(GENERATING, traces, answers, strict=True):
        assert answer.status_code == 200, answer.text
        root, generation = f"POST {endpoint.path}", f"{kinds.get(endpoint.path, 'chat')} stub"
        spans = await spans_of(received, trace_id, root, generation, "generate group-0", "deliver")
        assert spans[root].parent_id == CLIENT
        assert spans[root].attributes["http.route"] == endpoint.path
        assert spans[generation].parent_id == spans[root].span_id
        named = answer.headers[HEADER] if endpoint.named == HEADER else answer.json()["id"]
        assert same_generation(named, str(spans[generation].attributes["gen_ai.response.id"]))


def same_generation(one: str, other: str) -> bool:
    """Ids differ in what stands before them."""
    first, second = (re.split("[-_]", name, maxsplit=1)[-1] for name in (one, other))
    return first == second


@pytest.mark.slow
async def test_a_gateway_that_takes_over_goes_on_in_the_same_trace(house: House, received: Collector) -> None:
    await house.start("gateway-1", "services.gateway", "--port", "0")
    await until_answered(house.url("gateway-1"))
    trace_id = new_trace()
    headers = {"traceparent": f"00-{trace_id}-{CLIENT}-01", "x-ryzanstein-background": "60"}
    body = {"model": "stub", "prompt": "x", "max_tokens": 8000, "seed": 1, "stream": True}
    async with (
        httpx.AsyncClient(base_url=house.url("gateway-1"), trust_env=False, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        events = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
        public_id = json.loads((await anext(events)).removeprefix("data: "))["id"]
        first = await spans_of(received, trace_id, "send intake.interactive", "prefill")
        house.kill("gateway-1")
        with contextlib.suppress(httpx.TransportError):
            async for _ in events:
                pass
    assert "text_completion stub" not in first, "its span is lost with the gateway"
    original = first["send intake.interactive"].parent_id
    await until(lambda: '"event": "ownership_claimed"' in house.logs("gateway-0.log"))
    os.kill(house.group("executor-0").ranks[0].pid, signal.SIGKILL)
    await spans_of(received, trace_id, "send intake.recovery", "process intake.recovery")
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        assert (await http.delete(f"/v1/generations/{public_id}")).json()["cancelled"]
    spans = await spans_of(received, trace_id, "resume stub")
    resumed = spans["resume stub"]
    assert (resumed.parent_id, resumed.links) == (original, [(trace_id, original)])
    assert spans["send intake.recovery"].parent_id == resumed.span_id
    assert resumed.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]


@pytest.mark.slow
async def test_a_collector_that_stands_still_slows_nobody(house: House, received: Collector) -> None:
    """Requests are answered meanwhile, and a service ends within its time."""
    await house.start("gateway-2", "services.gateway", "--port", "0")
    await until_answered(house.url("gateway-2"))
    received.answering.clear()
    try:
        async with httpx.AsyncClient(base_url=house.url("gateway-2"), trust_env=False, timeout=60) as http:
            body = {"model": "stub", "prompt": "x", "max_tokens": 2}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
        assert await house.processes["gateway-2"].end() == 0, "within the 30 s that it is given"
    finally:
        received.answering.set()
    assert '"event": "spans_lost"' in house.logs("gateway-2.log")

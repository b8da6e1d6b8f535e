"""Embeddings over HTTP, as the official client sees them, with a ring that sends what the test says."""

import base64
import json
import struct
import threading
from typing import Any

import httpx
import openai
import pytest

from services.gateway.intake.prompts.embeddings import cut_tokens
from services.gateway.streams import stream_reader
from services.gateway.streams.embeddings import VectorFormat
from shared.messages import GenerationRequest
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.fake_ring import FakeRing, stub_card

MODEL = "embedder"
PATH = "/v1/embeddings"


def vector(prompt: list[int]) -> list[float]:
    """0.6 and 0.8 where the first token says so, of 4 numbers."""
    numbers = [0.0] * 4
    numbers[prompt[0] % 4], numbers[(prompt[0] + 1) % 4] = 0.6, 0.8
    return numbers


async def embed(ring: FakeRing, request: GenerationRequest) -> None:
    assert request.embed
    await ring.emit(request, 0, [], finish="stop", vector=struct.pack("<4f", *vector(request.prompt)))


@pytest.fixture
async def embedder(http: httpx.AsyncClient, ring: FakeRing) -> FakeRing:
    ring.behave = embed
    await ring.add_model(stub_card(MODEL, embedding_size=4, context_length=8))
    await until_listed(http, MODEL)
    return ring


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
async def test_inputs_become_vectors(client: openai.AsyncOpenAI, embedder: FakeRing, encoding: str | None) -> None:
    options: Any = {} if encoding is None else {"encoding_format": encoding}
    answer = await client.embeddings.create(model=MODEL, input=["abc", "d", "ef"], user="u", **options)
    shown = [item.embedding for item in answer.data]
    if encoding == "base64":
        shown = [list(struct.unpack("<4f", base64.b64decode(item))) for item in shown]  # type: ignore[arg-type]
    assert shown == [pytest.approx(vector([ord(letter)]), abs=1e-7) for letter in "ade"]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert (answer.object, answer.data[0].object, answer.model) == ("list", "embedding", MODEL)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)


@pytest.mark.parametrize("path", [PATH, "/pooling"])
async def test_vectors_come_as_bytes_with_their_places_in_a_header_or_without(
    http: httpx.AsyncClient, embedder: FakeRing, path: str
) -> None:
    body = {"model": MODEL, "input": ["abc", "d"], "embed_dtype": "float32", "endianness": "native"}
    answer = await http.post(path, json=body | {"encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert struct.unpack("<8f", answer.content) == pytest.approx([*vector([ord("a")]), *vector([ord("d")])])
    told = json.loads(answer.headers["metadata"])
    assert [answer.content[one["start"] : one["end"]] for one in told["data"]] == [
        answer.content[:16],
        answer.content[16:],
    ]
    assert (told["data"][1]["shape"], told["usage"]["prompt_tokens"], told["model"]) == ([4], 4, MODEL)
    alone = await http.post(path, json=body | {"encoding_format": "bytes_only"})
    assert (alone.content, "metadata" in alone.headers) == (answer.content, False)
    kept = await http.get(f"/v1/generations/{alone.headers['x-ryzanstein-generation']}")
    shown = kept.json()["response"]["data"][0]
    assert base64.b64decode(shown["data" if path == "/pooling" else "embedding"]) == answer.content[:16]
    many = await http.post(path, json={"model": MODEL, "input": ["a"] * 513, "encoding_format": "bytes"})
    assert (many.status_code, "limit vectors_in_header" in many.text) == (400, True), many.text
    other = await http.post(path, json=body | {"embed_dtype": "float16"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "embed_dtype")


async def test_pooling_is_vllms_list_of_vectors(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    answer = (await http.post("/pooling", json={"model": MODEL, "input": "a", "task": "embed"})).json()
    [item] = answer["data"]
    assert answer["id"].startswith("pool-")
    assert (item["object"], item["data"]) == ("pooling", pytest.approx(vector([ord("a")])))
    refused = await http.post("/pooling", json={"model": MODEL, "input": "a", "use_activation": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_activation")
    refused = await http.post("/pooling", json={"model": MODEL, "input": "a", "task": "classify"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")


async def test_many_vectors_are_written_beside_the_event_loop(
    client: openai.AsyncOpenAI, embedder: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    whole = VectorFormat.whole

    def noted(self: VectorFormat, *arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(self, *arguments)

    monkeypatch.setattr(VectorFormat, "whole", noted)
    monkeypatch.setattr(stream_reader, "LARGE", 64)
    for count in (4, 5):  # vectors of 16 bytes
        answer = await client.embeddings.create(model=MODEL, input=["a"] * count)
        assert len(answer.data) == count
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_every_kind_of_input(client: openai.AsyncOpenAI, embedder: FakeRing) -> None:
    kinds: list[Any] = ["ab", ["ab"], [97, 98], [[97, 98], [99]]]
    for kind in kinds:
        answer = await client.embeddings.create(model=MODEL, input=kind)
        assert answer.data[0].embedding == pytest.approx(vector([97]), abs=1e-7)
    assert sorted(request.prompt for request in embedder.requests) == [[97, 98]] * 4 + [[99]]
    assert {request.max_tokens for request in embedder.requests} == {1}


async def test_a_conversation_is_one_input(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
    answer = await http.post(PATH, json=body)
    assert answer.json()["data"][0]["embedding"] == pytest.approx(vector([ord("a")]), abs=1e-7)
    assert [bytes(request.prompt) for request in embedder.requests] == [b"abc\n"]
    invoked = await http.post("/invocations", json={"model": MODEL, "input": "abc"})
    assert invoked.json()["data"] == answer.json()["data"]
    for wrong in (body | {"input": "abc"}, {"model": MODEL}):
        error = (await http.post(PATH, json=wrong)).json()["error"]
        assert (error["param"], error["code"]) == ("input", "missing_required_parameter")
    long = body | {"messages": [{"role": "user", "content": "x" * 99}]}
    error = (await http.post(PATH, json=long)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    error = (await http.post(PATH, json=body | {"messages": [{"role": "tool", "content": "x"}]})).json()["error"]
    assert error["param"] == "messages[0].tool_call_id"


async def test_fewer_dimensions_are_brought_to_length_1(client: openai.AsyncOpenAI, embedder: FakeRing) -> None:
    answer = await client.embeddings.create(model=MODEL, input=["d", "c"], dimensions=1, encoding_format="float")
    # "d" has 0.6 first; "c" has 0.8 there
    assert [item.embedding for item in answer.data] == [[pytest.approx(1.0)], [pytest.approx(1.0)]]
    whole = await client.embeddings.create(model=MODEL, input="d", dimensions=4)
    assert whole.data[0].embedding == pytest.approx(vector([100]), abs=1e-7)


async def test_many_inputs_of_one_request(client: openai.AsyncOpenAI, embedder: FakeRing) -> None:
    answer = await client.embeddings.create(model=MODEL, input=[chr(97 + at % 26) for at in range(200)])
    assert [item.index for item in answer.data] == list(range(200))
    assert answer.data[30].embedding == pytest.approx(vector([97 + 30 % 26]), abs=1e-7)


async def test_bad_requests_are_refused(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    for fields, code, param in [
        ({"input": ["ok", "much too long"]}, "context_length_exceeded", "input[1]"),
        ({"input": "much too long"}, "context_length_exceeded", "input"),
        ({"input": ["ok", ""]}, "empty_prompt", "input[1]"),
        ({"input": []}, "empty_array", "input"),
        ({"input": [[1], "a"]}, "invalid_type", "input"),
        ({"input": [[1], [256]]}, "invalid_token_id", "input[1]"),
        ({"input": ["a"] * 2049}, "array_above_max_length", "input"),
        ({"dimensions": 5}, "integer_above_max_value", "dimensions"),
        ({"stream": True}, "unknown_parameter", "stream"),
        ({"model": "org/stub-model"}, "unsupported_task", "model"),
    ]:
        answer = await http.post(PATH, json={"model": MODEL, "input": "a"} | fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert not embedder.requests


async def test_too_long_inputs_can_be_cut(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    for count in (-1, 3):
        body = {"model": MODEL, "input": "much too long", "truncate_prompt_tokens": count}
        assert (await http.post(PATH, json=body)).status_code == 200
    assert [bytes(request.prompt) for request in embedder.requests] == [b"too long", b"ong"]


async def test_embeddings_are_not_streamed(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    await http.post(PATH, json={"model": MODEL, "input": "a"})
    public_id = "embd-" + embedder.requests[0].generation_id.rpartition("-")[0]
    state = (await http.get(f"/v1/generations/{public_id}")).json()
    assert (state["endpoint"], state["status"]) == ("embeddings", "completed")
    assert len(state["response"]["data"]) == 1
    refused = await http.get(f"/v1/generations/{public_id}/stream")
    assert refused.status_code == 400, refused.text


async def test_each_model_does_its_own(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    encoder = {"embedding_size": 4, "tasks": ["embed"], "bidirectional": True}
    await embedder.add_model(stub_card("encoder", **encoder, matryoshka_dimensions=[2]))
    await embedder.add_model(stub_card("whole", **encoder, matryoshka_dimensions=[]))
    await embedder.add_model(stub_card("classes", tasks=["classify"], labels=["a", "b"]))
    for name in ("encoder", "whole", "classes"):
        await until_listed(http, name)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"model": "encoder", **chat}, "it gives embeddings (/v1/embeddings)"),
        ("/v1/completions", {"model": "encoder", "prompt": "a"}, "generates no text"),
        ("/v1/responses", {"model": "classes", "input": "a"}, "it is a classifier (/v1/classify"),
        (PATH, {"model": "classes", "input": "a"}, "gives no embeddings"),
        (PATH, {"model": "encoder", "input": "a", "dimensions": 3}, "vectors of 4 numbers or 2"),
        (PATH, {"model": "whole", "input": "a", "dimensions": 2}, "and for no others; leave it out"),
    ]
    for path, body, message in refused:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert not embedder.requests
    for dimensions in (2, 4):
        answer = await http.post(PATH, json={"model": "encoder", "input": "a", "dimensions": dimensions})
        assert len(answer.json()["data"][0]["embedding"]) == dimensions


async def test_texts_are_put_behind_the_models_prompts(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    prompts = {"query": "q:", "document": ""}
    card = stub_card("asked", embedding_size=4, prompts=prompts, default_prompt="query")
    await embedder.add_model(card)
    await until_listed(http, "asked")
    for name, sent in ((None, b"q:a"), ("query", b"q:a"), ("document", b"a")):
        body = {"model": "asked", "input": ["a", "b"], "prompt_name": name}
        assert (await http.post(PATH, json=body)).status_code == 200
        assert sent in [bytes(request.prompt) for request in embedder.requests]
        embedder.requests.clear()
    await http.post(PATH, json={"model": "asked", "input": [[97]]})
    assert embedder.requests[0].prompt == [97]
    for model, message in (("asked", "it has query, document"), (MODEL, "it has none")):
        refused = await http.post(PATH, json={"model": model, "input": "a", "prompt_name": "passage"})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "prompt_name")
        assert message in error["message"]


@pytest.mark.parametrize(
    ("count", "side", "kept"),
    [
        (5, "right", [101, 1, 2, 3, 102]),
        (5, "left", [101, 4, 5, 6, 102]),
        (2, "right", [101, 1]),
        (2, "left", [6, 102]),
        (9, "right", [101, 1, 2, 3, 4, 5, 6, 102]),
    ],
)
def test_an_encoders_special_tokens_stay(count: int, side: str, kept: list[int]) -> None:
    tokens = [101, 1, 2, 3, 4, 5, 6, 102]
    assert cut_tokens(tokens, count=count, side=side, around=[101, 102]) == kept
    plain = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert cut_tokens(plain, count=count, side=side, around=[101, 102]) == (
        plain[:count] if side == "right" else plain[-count:]
    )


async def test_an_encoder_reads_the_beginning(http: httpx.AsyncClient, embedder: FakeRing) -> None:
    card = stub_card("encoder", embedding_size=4, context_length=8, tasks=["embed"], bidirectional=True)
    await embedder.add_model(card)
    await until_listed(http, "encoder")
    for fields, sent in (({}, b"much too"), ({"truncation_side": "left"}, b"too long")):
        body = {"model": "encoder", "input": "much too long", "truncate_prompt_tokens": -1}
        assert (await http.post(PATH, json=body | fields)).status_code == 200
        assert bytes(embedder.requests[-1].prompt) == sent

"""Rerank, score and classify over HTTP, with a ring that sends what the test says."""

import asyncio
import json
import math
import struct
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, processors

from services.gateway.dialects.pooling import routes as shapes
from services.gateway.dialects.pooling.prompts import INSTRUCT, JUDGE
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared import limits
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import FakeRing, silence, stub_card, until
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

RERANKER, CLASSES, EMBEDDER = "reranker", "classes", "embedder"
QUERY, DOCUMENTS = "a", ["b", "ccc", "dd"]
RANK = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS}


async def send(ring: FakeRing, request: GenerationRequest, *numbers: float) -> None:
    await ring.emit(request, 0, [], finish="stop", vector=struct.pack(f"<{len(numbers)}f", *numbers))


async def judge(ring: FakeRing, request: GenerationRequest) -> None:
    """Logits: the prompt's length less four; vectors: (length, 1); yes has log 0.75 where there is a `!`."""
    length = len(request.prompt)
    if request.classify:
        labels = 3 if request.model == CLASSES else 1
        await send(ring, request, *([float(length - 4)] + [0.0] * (labels - 1)))
    elif request.logprob_token_ids:
        yes = 0.75 if bytes([ord("!")]) in bytes(token % 256 for token in request.prompt) else 0.25
        await send(ring, request, math.log(yes), math.log(1 - yes))
    else:
        assert request.embed
        await send(ring, request, float(length), 1.0)


@pytest.fixture
async def judged(http: httpx.AsyncClient, ring: FakeRing) -> FakeRing:
    ring.behave = judge
    one = {"tasks": ["classify"], "labels": ["relevant"], "activation": "sigmoid", "context_length": 16}
    await ring.add_model(stub_card(RERANKER, **one))
    several = {"tasks": ["classify"], "labels": ["bad", "fair", "good"], "activation": "softmax"}
    await ring.add_model(stub_card(CLASSES, **several))
    prompts = {"query": "?", "document": ""}
    await ring.add_model(stub_card(EMBEDDER, tasks=["embed"], embedding_size=2, prompts=prompts))
    for name in (RERANKER, CLASSES, EMBEDDER):
        await until_listed(http, name)
    return ring


async def posted(http: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> Any:
    answer = await http.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


# --- rerank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_ranked(http: httpx.AsyncClient, judged: FakeRing, path: str) -> None:
    body = RANK | {"documents": ["b", {"text": "ccc"}, "dd"]}
    answer = await posted(http, path, body)
    assert answer["results"] == [
        {"index": index, "relevance_score": pytest.approx(sigmoid(logit)), "document": {"text": text}}
        for index, logit, text in ((1, 1, "ccc"), (2, 0, "dd"), (0, -1, "b"))
    ]
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert answer["meta"]["tokens"] == {"input_tokens": 12, "output_tokens": 0}
    assert answer["model"] == RERANKER
    assert sorted(bytes(request.prompt) for request in judged.requests) == [b"a\nb", b"a\nccc", b"a\ndd"]
    assert {(one.second_segment, one.max_tokens, one.classify) for one in judged.requests} == {(2, 1, True)}


async def test_some_are_shown_and_logits_as_they_are(http: httpx.AsyncClient, judged: FakeRing) -> None:
    body = RANK | {"top_n": 2, "return_documents": False, "use_activation": False, "user": "u"}
    answer = await posted(http, "/v1/rerank", body)
    assert answer["results"] == [{"index": 1, "relevance_score": 1.0}, {"index": 2, "relevance_score": 0.0}]
    for more in (0, 4):  # clients name a number, however few documents there are
        everything = await posted(http, "/v1/rerank", RANK | {"top_n": more})
        assert len(everything["results"]) == 3


async def test_long_documents_are_cut(http: httpx.AsyncClient, judged: FakeRing) -> None:
    body = RANK | {"documents": ["0123456789abcdefghi", "xy"]}
    refused = (await http.post("/rerank", json=body)).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "documents[0]")
    for more, sent in (
        ({"max_tokens_per_doc": 3}, b"a\n012"),
        ({"truncate_prompt_tokens": 6}, b"a\n0123"),
        ({"truncate_prompt_tokens": -1}, b"a\n0123456789abcd"),
    ):
        judged.requests.clear()
        await posted(http, "/rerank", body | more)
        assert sorted(bytes(one.prompt) for one in judged.requests) == sorted((sent, b"a\nxy"))


async def test_embedders_compare_vectors(http: httpx.AsyncClient, judged: FakeRing) -> None:
    body = RANK | {"model": EMBEDDER, "documents": ["b", "cc"], "max_tokens_per_doc": 1}
    answer = await posted(http, "/rerank", body)
    assert sorted(bytes(one.prompt) for one in judged.requests) == [b"?a", b"b", b"c"]
    expected = 3 / (math.sqrt(5) * math.sqrt(2))
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
        (0, pytest.approx(expected)),
        (1, pytest.approx(expected)),
    ]
    assert [one["document"]["text"] for one in answer["results"]] == ["b", "cc"]
    pairs = {"model": EMBEDDER, "queries": ["a", "aaaa"], "documents": ["bb", "bbbbb"]}
    scores = (await posted(http, "/score", pairs))["data"]
    assert [one["score"] for one in scores] == [pytest.approx(1.0), pytest.approx(1.0)]


# --- language models that answer yes or no ---------------------------------------------------------


def answering_files() -> dict[str, bytes]:
    """A tokenizer that has yes and no as tokens, of a model that chats."""
    files = tiny_files()
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.add_tokens([AddedToken("yes"), AddedToken("no")])
    return files | {"tokenizer.json": tokenizer.to_str().encode()}


async def add_tokenized(
    http: httpx.AsyncClient, ring: FakeRing, name: str, files: dict[str, bytes], **card: Any
) -> ModelTokenizer:
    await ring.add_tokenizer(f"{name}-files", files)
    await ring.add_model(stub_card(name, tokenizer=f"{name}-files", vocab_size=270, **card))
    await until_listed(http, name)
    return ModelTokenizer(files)


async def test_a_language_model_answers_yes_or_no(http: httpx.AsyncClient, judged: FakeRing) -> None:
    tokenizer = await add_tokenized(http, judged, "asked", answering_files())
    body = {"model": "asked", "query": "q", "documents": ["good", "<|end|>"]}
    answer = await posted(http, "/v1/rerank", body)
    assert {one["index"] for one in answer["results"]} == {0, 1}
    assert all(one["relevance_score"] in (pytest.approx(0.25), pytest.approx(0.75)) for one in answer["results"])
    yes, no = await tokenizer.encode_parts([["yes"], ["no"]])
    sent = {one.generation_id[-1]: one for one in judged.requests}
    for number, text in enumerate(body["documents"]):
        request = sent[str(number)]
        assert request.logprob_token_ids == [*yes, *no]
        pair = f"<Instruct>: {INSTRUCT}\n<Query>: q\n<Document>: {text}"
        assert tokenizer.decode(request.prompt, skip_special_tokens=False) == (
            f"<|start|>system\n{JUDGE}<|end|>\n<|start|>user\n{pair}<|end|>\n<|start|>assistant\n"
        )
        assert request.prompt.count(1) == 2, "a document writes no special token"
    whole = len(sent["0"].prompt)
    judged.requests.clear()
    for more in ({"max_tokens_per_doc": 2}, {"truncate_prompt_tokens": whole - 2}):
        await posted(http, "/v1/rerank", body | {"documents": ["good"]} | more)
        shown = tokenizer.decode(judged.requests.pop().prompt, skip_special_tokens=False)
        assert "<Document>: go<|end|>\n<|start|>assistant" in shown
    for most in (9, whole - 4):
        refused = await http.post("/v1/rerank", json=body | {"truncate_prompt_tokens": most})
        assert refused.status_code == 400, refused.text
        assert "leave no room for 'documents[0]'" in refused.json()["error"]["message"]


ASKING = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


async def test_templates_without_system_messages(http: httpx.AsyncClient, judged: FakeRing) -> None:
    files = answering_files() | {"chat_template.jinja": ASKING.encode()}
    tokenizer = await add_tokenized(http, judged, "plain", files)
    await posted(http, "/rerank", {"model": "plain", "query": "q", "documents": ["d"]})
    shown = tokenizer.decode(judged.requests.pop().prompt, skip_special_tokens=False)
    assert shown == f"{JUDGE}\n<Instruct>: {INSTRUCT}\n<Query>: q\n<Document>: d"


# As vLLM's template of Qwen3-Reranker is made, and sentence-transformers': it knows the variable, or a system message.
VARIABLE = "instruction | default('by default', true)"
MESSAGE = "messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('by default')"
RERANKING = (
    "<|start|>judge<|end|><|start|>by: {{ HOW }}\n"
    "of: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "is: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|end|>answers?<|start|>"
)


@pytest.mark.parametrize("how", [VARIABLE, MESSAGE])
async def test_templates_of_rerankers_show_the_two_roles(http: httpx.AsyncClient, judged: FakeRing, how: str) -> None:
    files = answering_files() | {"chat_template.jinja": RERANKING.replace("HOW", how).encode()}
    tokenizer = await add_tokenized(http, judged, "ranks", files)
    classes = {"tasks": ["classify"], "labels": ["relevant"], "activation": "sigmoid"}
    await add_tokenized(http, judged, "ranks-classes", files, **classes)
    body = {"query": "q<|end|>", "documents": ["good!", "<|start|>"]}
    for more, instruction in (({}, "by default"), ({"instruction": "<|end|>taste"}, "<|end|>taste")):
        for model in ("ranks", "ranks-classes"):
            judged.requests.clear()
            answer = await posted(http, "/v1/rerank", {"model": model} | body | more)
            sent = sorted(judged.requests, key=lambda one: one.generation_id)
            assert [bool(one.logprob_token_ids) for one in sent] == [model == "ranks"] * 2
            assert [one.classify for one in sent] == [model != "ranks"] * 2
            for request, text in zip(sent, body["documents"], strict=True):
                assert tokenizer.decode(request.prompt, skip_special_tokens=False) == (
                    f"<|start|>judge<|end|><|start|>by: {instruction}\nof: q<|end|>\nis: {text}<|end|>answers?<|start|>"
                )
                assert request.prompt[0] == 0
                assert (request.prompt.count(0), request.prompt.count(1)) == (3, 2), "the template's alone"
        assert answer["results"][0]["relevance_score"] > 0.5
    cut = {"model": "ranks", "max_tokens_per_doc": 2}
    judged.requests.clear()
    await posted(http, "/v1/rerank", cut | {"query": "q", "documents": ["good"]})
    assert "is: go<|end|>answers?" in tokenizer.decode(judged.requests.pop().prompt, skip_special_tokens=False)


async def test_what_stands_behind_a_document_is_not_cut(http: httpx.AsyncClient, judged: FakeRing) -> None:
    """Also where that is the query; here the template takes no instruction."""
    template = (
        "{% for role in ('document', 'query') %}"
        "{{ (messages | selectattr('role', 'eq', role) | first).content }} {% endfor %}"
    )
    tokenizer = await add_tokenized(
        http, judged, "turned", answering_files() | {"chat_template.jinja": template.encode()}
    )
    body = {"model": "turned", "queries": ["q", "qq"], "documents": ["long", "longer"]}
    await posted(http, "/v1/score", body | {"truncate_prompt_tokens": 7})
    shown = {tokenizer.decode(one.prompt, skip_special_tokens=False) for one in judged.requests}
    assert shown == {"long q ", "lon qq "}
    refused = (await http.post("/v1/score", json=body | {"instruction": "by taste"})).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "instruction")


async def test_what_a_template_makes_of_pairs_is_bounded(http: httpx.AsyncClient, judged: FakeRing) -> None:
    """However little a client has sent."""
    pair = "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    document = pair.replace("query", "document")
    body = {"query": "q", "documents": ["d"] * 100}
    long = await add_tokenized(
        http, judged, "long", answering_files() | {"chat_template.jinja": f"{'x' * 90_000}{pair}{document}".encode()}
    )
    assert long.traits.pairs
    error = (await http.post("/rerank", json=body | {"model": "long"})).json()["error"]
    assert (error["code"], error["param"]) == ("string_above_max_length", "documents")
    assert limits.SCORED_CHARACTERS.name in error["message"]
    often = f"{{% for _ in range(9) %}}{pair}{{% endfor %}}{document}"
    await add_tokenized(http, judged, "often", answering_files() | {"chat_template.jinja": often.encode()})
    error = (await http.post("/rerank", json=body | {"model": "often"})).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_task", "model")
    assert not judged.requests


async def test_an_instruction_without_a_template_of_its_own(http: httpx.AsyncClient, judged: FakeRing) -> None:
    tokenizer = await add_tokenized(http, judged, "told", answering_files())
    body = {"query": "q", "documents": ["d"], "instruction": "By taste."}
    await posted(http, "/rerank", body | {"model": "told"})
    shown = tokenizer.decode(judged.requests.pop().prompt, skip_special_tokens=False)
    assert "<|start|>user\n<Instruct>: By taste.\n<Query>: q\n<Document>: d<|end|>" in shown
    for model in (RERANKER, EMBEDDER):
        refused = (await http.post("/rerank", json=body | {"model": model})).json()["error"]
        assert (refused["code"], refused["param"]) == ("unsupported_parameter", "instruction")
    assert not judged.requests


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), (b"{{ messages[0]['role'] }}", "does not show messages as they are")],
)
async def test_language_models_that_cannot_be_asked(
    http: httpx.AsyncClient, judged: FakeRing, template: bytes | None, message: str
) -> None:
    files = answering_files()
    del files["chat_template.jinja"]
    await add_tokenized(http, judged, "mute", files | ({"chat_template.jinja": template} if template else {}))
    answer = await http.post("/rerank", json={"model": "mute", "query": "q", "documents": ["d"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_task")
    assert message in error["message"]
    assert not judged.requests


async def test_pairs_are_joined_as_the_tokenizer_says(http: httpx.AsyncClient, judged: FakeRing) -> None:
    files = tiny_files(template=None)
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        pair="<|start|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|start|>", 0), ("<|end|>", 1)],
    )
    files["tokenizer.json"] = tokenizer.to_str().encode()
    card = {"tasks": ["classify"], "labels": ["relevant"], "activation": "identity", "bidirectional": True}
    known = await add_tokenized(http, judged, "joined", files, **card)
    body = {"model": "joined", "query": "ab", "documents": ["cdef"]}
    for more, shown in (
        ({}, "<|start|>ab<|end|>cdef<|end|>"),
        ({"max_tokens_per_doc": 3}, "<|start|>ab<|end|>cde<|end|>"),
        ({"truncate_prompt_tokens": 7}, "<|start|>ab<|end|>cd<|end|>"),
    ):
        answer = await posted(http, "/v1/rerank", body | more)
        request = judged.requests.pop()
        assert known.decode(request.prompt, skip_special_tokens=False) == shown
        assert request.second_segment == 4
        assert answer["results"][0]["relevance_score"] == len(request.prompt) - 4
    refused = await http.post("/v1/rerank", json=body | {"truncate_prompt_tokens": 5})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


# --- score and classify ----------------------------------------------------------------------------


async def test_pairs_are_scored(http: httpx.AsyncClient, judged: FakeRing) -> None:
    for fields, logits in [
        ({"text_1": "a", "text_2": "b"}, [-1]),
        ({"text_1": "a", "text_2": ["b", "cc"]}, [-1, 0]),
        ({"text_1": ["a", "aa"], "text_2": ["b", "cc"]}, [-1, 1]),
        ({"queries": "a", "documents": ["b", "cc"]}, [-1, 0]),
    ]:
        for path in ("/v1/score", "/score"):
            answer = await posted(http, path, {"model": RERANKER} | fields)
            assert answer["data"] == [
                {"index": index, "object": "score", "score": pytest.approx(sigmoid(logit))}
                for index, logit in enumerate(logits)
            ]
            assert (answer["object"], answer["id"][:6]) == ("list", "score-")


async def test_texts_are_classified(http: httpx.AsyncClient, judged: FakeRing) -> None:
    for path, given in (("/v1/classify", ["abcdef", "a"]), ("/classify", [[97] * 6, [97]])):
        answer = await posted(http, path, {"model": CLASSES, "input": given})
        assert [(one["index"], one["label"], one["num_classes"]) for one in answer["data"]] == [
            (0, "bad", 3),
            (1, "fair", 3),
        ]
        assert answer["data"][0]["probs"] == pytest.approx(
            [math.exp(2) / (math.exp(2) + 2), *[1 / (math.exp(2) + 2)] * 2]
        )
        assert answer["usage"]["prompt_tokens"] == 7
    logits = await posted(http, "/classify", {"model": CLASSES, "input": "a", "use_activation": False})
    assert logits["data"][0]["probs"] == [-3.0, 0.0, 0.0]


async def test_answers_are_what_the_document_says(http: httpx.AsyncClient, judged: FakeRing) -> None:
    strict: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/rerank", RANK, shapes.Ranking),
        ("/v1/score", {"model": RERANKER, "text_1": "a", "text_2": "b"}, shapes.Scores),
        ("/v1/classify", {"model": CLASSES, "input": "a"}, shapes.Classes),
    ]
    for path, body, kind in strict:
        answer = await posted(http, path, body)
        assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


# --- as every generation ---------------------------------------------------------------------------


async def test_texts_of_large_records_are_found_again(
    http: httpx.AsyncClient, judged: FakeRing, nats_settings: CommonSettings
) -> None:
    """Documents that one message of NATS has no room for."""
    await judged.add_model(
        stub_card("long", tasks=["classify"], labels=["relevant"], activation="sigmoid", context_length=2048)
    )
    await until_listed(http, "long")
    documents = [chr(97 + number % 26) * 2000 for number in range(600)]
    body = {"model": "long", "query": "q", "documents": documents}
    headers = {"Idempotency-Key": "large"}
    answer = await posted(http, "/v1/rerank", body, headers=headers)
    assert [one["document"]["text"] for one in answer["results"]] == documents
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        assert await posted(theirs, "/v1/rerank", body, headers=headers) == answer
    assert len(judged.requests) == 600


async def test_a_client_that_goes_takes_its_pairs_along(http: httpx.AsyncClient, judged: FakeRing) -> None:
    judged.behave = silence
    asking = asyncio.create_task(http.post("/v1/rerank", json=RANK))
    await until(lambda: len(judged.requests) == 3)
    state = (await http.get("/v1/generations/" + judged.requests[0].generation_id.rpartition("-")[0])).json()
    assert (state["status"], state["response"]["results"]) == ("queued", [])
    asking.cancel()
    await until(lambda: len(judged.cancelled) == 3)


async def test_lines_of_batches(http: httpx.AsyncClient, judged: FakeRing) -> None:
    bodies = {
        "/v1/rerank": RANK,
        "/v1/score": {"model": RERANKER, "text_1": "a", "text_2": "b"},
        "/v1/classify": {"model": CLASSES, "input": "a"},
    }
    for url, body in bodies.items():
        await judged.put_record("ready", model=body["model"])
        line = {"custom_id": "1", "method": "POST", "url": url, "body": body}
        form = {"file": ("input.jsonl", json.dumps(line).encode())}
        file = (await http.post("/v1/files", data={"purpose": "batch"}, files=form)).json()["id"]
        given = {"input_file_id": file, "endpoint": url, "completion_window": "1h"}
        batch = (await http.post("/v1/batches", json=given)).json()

        async def ended(name: str = batch["id"]) -> bool:
            return bool((await http.get(f"/v1/batches/{name}")).json()["status"] == "completed")

        await until(ended, 20)
        output = (await http.get(f"/v1/batches/{batch['id']}")).json()["output_file_id"]
        (result,) = (await http.get(f"/v1/files/{output}/content")).text.splitlines()
        assert json.loads(result)["response"]["status_code"] == 200


# --- bad input -------------------------------------------------------------------------------------


async def test_bad_requests_are_refused(http: httpx.AsyncClient, judged: FakeRing) -> None:
    for path, fields, code, param in [
        ("rerank", {"documents": []}, "empty_array", "documents"),
        ("rerank", {"documents": ["b", ""]}, "empty_string", "documents"),
        ("rerank", {"documents": [{"title": "b"}]}, "unknown_parameter", "documents[0].title"),
        ("rerank", {"documents": ["b"] * 2049}, "array_above_max_length", "documents"),
        ("rerank", {"query": ""}, "empty_string", "query"),
        ("rerank", {"top_n": -1}, "integer_below_min_value", "top_n"),
        ("rerank", {"rank_fields": ["title"]}, "unsupported_parameter", "rank_fields"),
        ("rerank", {"max_chunks_per_doc": 3}, "unsupported_parameter", "max_chunks_per_doc"),
        ("rerank", {"relevant_spans": {}}, "unsupported_parameter", "relevant_spans"),
        ("rerank", {"top_k": 1}, "unknown_parameter", "top_k"),
        ("rerank", {"stream": True}, "unknown_parameter", "stream"),
        ("rerank", {"truncate_prompt_tokens": 0}, "integer_below_min_value", "truncate_prompt_tokens"),
        ("rerank", {"truncate_prompt_tokens": 17}, "integer_above_max_value", "truncate_prompt_tokens"),
        ("rerank", {"model": CLASSES}, "unsupported_task", "model"),
        ("rerank", {"model": "org/stub-model"}, "unsupported_task", "model"),
        ("rerank", {"model": "nobody"}, "model_not_found", "model"),
        ("score", {"queries": None}, "missing_required_parameter", "queries"),
        ("score", {"documents": None}, "missing_required_parameter", "documents"),
        ("score", {"queries": []}, "empty_array", "queries"),
        ("score", {"queries": ["a", "b"]}, "invalid_value", "queries"),
        ("score", {"text_1": "a"}, "invalid_value", "queries"),
        ("score", {"documents": ["b"] * 2049}, "array_above_max_length", "documents"),
        ("classify", {"input": []}, "empty_array", "input"),
        ("classify", {"input": ""}, "empty_prompt", "input"),
        ("classify", {"truncate_prompt_tokens": 0}, "integer_below_min_value", "truncate_prompt_tokens"),
        ("classify", {"model": EMBEDDER}, "unsupported_task", "model"),
    ]:
        good: dict[str, dict[str, Any]] = {
            "rerank": RANK,
            "score": {"model": RERANKER, "queries": "a", "documents": ["b", "c", "d"]},
            "classify": {"model": CLASSES, "input": "a"},
        }
        answer = await http.post(f"/v1/{path}", json=good[path] | fields)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert not judged.requests


async def test_more_than_the_bounds_is_refused(
    http: httpx.AsyncClient, judged: FakeRing, nats_settings: CommonSettings
) -> None:
    async with run_gateway(nats_settings, generation_bytes=1 << 20) as small, small.http() as theirs:
        await until_listed(theirs, EMBEDDER)
        body = {"model": EMBEDDER, "query": "a", "documents": ["b" * 2000] * 110}
        answer = await theirs.post("/v1/rerank", json=body)
        assert answer.status_code == 413, answer.text
        assert "limit generation_bytes" in answer.json()["error"]["message"]
        answer = await theirs.post("/v1/embeddings", json={"model": EMBEDDER, "input": ["b" * 2000] * 110})
        assert "limit generation_bytes" in answer.json()["error"]["message"]
    body = {"model": RERANKER, "query": "a" * 8192, "documents": ["b"] * 1024}
    error = (await http.post("/v1/rerank", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("string_above_max_length", "documents")
    assert f"limit {limits.SCORED_CHARACTERS.name}" in error["message"]
    assert not judged.requests


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/score", {"queries": "a", "documents": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_an_empty_model_is_refused(http: httpx.AsyncClient, path: str, fields: dict[str, object]) -> None:
    answer = await http.post(path, json={"model": "", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_pooling_of_a_classifier_is_the_probabilities_of_its_classes(
    http: httpx.AsyncClient, judged: FakeRing
) -> None:
    body = {"model": CLASSES, "input": ["a"]}
    classes = (await posted(http, "/classify", body))["data"][0]["probs"]
    assert (await posted(http, "/pooling", body))["data"] == [
        {"index": 0, "object": "pooling", "data": pytest.approx(classes)}
    ]
    octets = await http.post("/pooling", json=body | {"encoding_format": "bytes_only"})
    assert struct.unpack("<3f", octets.content) == pytest.approx(classes)
    refused = await http.post("/pooling", json=body | {"dimensions": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")

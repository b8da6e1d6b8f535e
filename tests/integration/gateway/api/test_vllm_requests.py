"""Requests as vLLM's clients and tests send them, and what they read of the answers."""

from typing import Any

import httpx
import openai
import pytest

from services.gateway.intake.headers import IGNORED_HEADER
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
USER: Any = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 4},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": USER, "max_tokens": 4},
    "/v1/embeddings": {"input": "Hi", "dimensions": None},
}


async def test_signs_of_life_have_a_request_id(http: httpx.AsyncClient) -> None:
    for path in ["/health", "/ready", "/ping", "/metrics"]:
        assert (await http.get(path)).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_the_only_model_need_not_be_named_and_null_is_not_given(
    gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing, path: str
) -> None:
    body = BODIES[path] | {"never_heard_of": None}
    for named in ({}, {"model": None}, {"model": MODEL}):
        answer = await http.post(path, json=body | named)
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL), answer.text
    refused = await http.post(path, json=body | {"never_heard_of": 1})
    assert refused.status_code == 400
    assert "never_heard_of" in refused.text
    await ring.add_model(stub_card("another"))
    await until(lambda: len(gateway.service.work.catalog.names()) == 2)
    several = await http.post(path, json=body)
    assert several.status_code == 400
    assert "'model'; 2 models are served" in several.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{MESSAGES}/count_tokens", {"messages": USER}),
        (f"{RESPONSES}/input_tokens", {"input": "Hi"}),
        (f"{RESPONSES}/compact", {"input": "Hi"}),
    ],
)
async def test_nor_need_it_be_where_tokens_are_counted(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    named, unnamed = [(await http.post(path, json=body | name)) for name in ({"model": MODEL}, {})]
    assert (unnamed.status_code, unnamed.json().get("input_tokens")) == (200, named.json().get("input_tokens"))


async def test_what_was_not_asked_for_is_null(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model=MODEL, messages=USER)
    assert chat.model_extra["prompt_logprobs"] is None
    completion = await client.completions.create(model=MODEL, prompt="Hi")
    assert completion.choices[0].model_extra["prompt_logprobs"] is None


async def test_every_chunk_of_a_choice_has_log_probabilities_where_they_were_asked_for(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [bool(chunk.finish_reason) for chunk in chunks].index(True) == len(chunks) - 1
    assert all(chunk.logprobs is not None for chunk in chunks)
    plain = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
    assert all([chunk.choices[0].logprobs is None async for chunk in plain])


async def test_a_model_says_what_may_be_done_with_it(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    [permission] = model.permission  # type: ignore[attr-defined]
    assert (permission["object"], permission["allow_sampling"], permission["allow_fine_tuning"]) == (
        "model_permission",
        True,
        False,
    )


async def test_responses_sample_as_chats_do(http: httpx.AsyncClient, ring: FakeRing) -> None:
    fields = {
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": 3.0},
        "ignore_eos": True,
        "stop": ["rld"],
        "vllm_xargs": {"x": 1},
    }
    answer = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi"} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "vllm_xargs"
    assert answer.json()["output"][0]["content"][0]["text"] == "Hello, wo"
    request = ring.requests[-1]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.logit_bias) == (7, 0.1, 42, {65: 3.0})
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert request.stop_token_ids == []


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (CHAT, {"vllm_xargs": {"x": 1}}, "vllm_xargs"),
        (MESSAGES, {"chat_template_kwargs": {"style": 1}}, "chat_template_kwargs.style"),
    ],
)
async def test_what_means_nothing_to_this_model_is_ignored_and_named(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = await http.post(path, json=BODIES[path] | {"model": MODEL} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == named


async def test_beam_search_is_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "Hi", "n": 2, "use_beam_search": True}
    error = (await http.post(COMPLETIONS, json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("use_beam_search", "unsupported_parameter")
    assert "use 'best_of' or 'n'" in error["message"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (BODIES[CHAT], "chat.completion"),
        (BODIES[COMPLETIONS], "text_completion"),
        ({"input": "Hi"}, ""),
        ({"query": "Which?", "documents": ["a"]}, ""),
        ({"text_1": "a", "text_2": "b"}, ""),
    ],
)
async def test_an_invocation_is_what_its_fields_are(http: httpx.AsyncClient, body: dict[str, Any], kind: str) -> None:
    answer = await http.post("/invocations", json=body | {"model": MODEL})
    if kind:
        assert (answer.status_code, answer.json()["object"]) == (200, kind), answer.text
    else:  # this model generates text alone
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task"), answer.text


async def test_an_invocation_of_nothing_is_told_what_there_is(http: httpx.AsyncClient) -> None:
    error = (await http.post("/invocations", json={"model": MODEL})).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    assert "prompt" in error["message"]


async def test_prompts_are_shown_as_the_model_would_read_them(http: httpx.AsyncClient, ring: FakeRing) -> None:
    chat = (await http.post(f"{CHAT}/render", json=BODIES[CHAT] | {"model": MODEL})).json()
    assert (chat["model"], bytes(chat["token_ids"])) == (MODEL, b"Hi\n")
    prompts = (await http.post(f"{COMPLETIONS}/render", json={"model": MODEL, "prompt": ["a", "bc"]})).json()
    assert [bytes(one["token_ids"]) for one in prompts] == [b"a", b"bc"]
    assert (await http.post(f"{CHAT}/render", json=BODIES[CHAT])).json()["model"] == MODEL
    refused = await http.post(f"{CHAT}/render", json={"model": MODEL, "messages": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert ring.requests == [], "nothing is generated"

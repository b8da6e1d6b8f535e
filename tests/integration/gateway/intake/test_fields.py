"""The fields beside the plain ones: what each does to the request that a ring gets, or to the answer."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest, TokenLogprobs
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card
from tests.integration.gateway.resuming import finishes, public_id, resumed, streamed, text_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
SCORES = {"0": -1.0, "1": -0.25, "2": -4.0, "3": -0.5}


async def candidates(ring: FakeRing, request: GenerationRequest) -> None:
    """Choice i says its number twice, with the log probability of `SCORES`."""
    choice = request.generation_id[-1]
    scores = [TokenLogprobs(SCORES[choice])] * 2
    await ring.emit(request, 0, [ord(choice)] * 2, finish="stop", logprobs=scores)


async def test_the_best_candidates_are_shown_on_any_gateway(
    http: httpx.AsyncClient, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = candidates
    body = {"model": MODEL, "prompt": "x", "best_of": 4, "n": 2, "echo": True, "max_tokens": 2}
    headers = {"Idempotency-Key": "best"}
    answer = (await http.post(COMPLETIONS, json=body, headers=headers)).json()
    assert [(item["index"], item["text"]) for item in answer["choices"]] == [(0, "x11"), (1, "x33")]
    assert all(item["logprobs"] is None for item in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 8
    assert len(ring.requests) == 4
    assert {request.sampling.logprobs for request in ring.requests} == {0}
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        assert (await theirs.post(COMPLETIONS, json=body, headers=headers)).json() == answer
        state = (await theirs.get(f"/v1/generations/{answer['id']}")).json()
        assert state["response"]["choices"] == answer["choices"]
        refused = await theirs.get(f"/v1/generations/{answer['id']}/stream")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    assert len(ring.requests) == 4


async def test_logprobs_of_the_best_are_shown_where_they_were_asked_for(
    http: httpx.AsyncClient, ring: FakeRing
) -> None:
    ring.behave = candidates
    answer = (
        await http.post(COMPLETIONS, json={"model": MODEL, "prompt": ["x", "y"], "best_of": 2, "logprobs": 0})
    ).json()
    assert [item["text"] for item in answer["choices"]] == ["11", "33"]
    assert answer["choices"][1]["logprobs"]["token_logprobs"] == [-0.5, -0.5]


async def test_an_echo_comes_once_and_before_the_output(http: httpx.AsyncClient, nats_settings: CommonSettings) -> None:
    body = {"model": MODEL, "prompt": ["One ", "Two "], "echo": True, "stream": True, "n": 2}
    events = await streamed(http, COMPLETIONS, body)
    texts = [text_of(events, choice) for choice in range(4)]
    assert texts == ["One Hello, world!"] * 2 + ["Two Hello, world!"] * 2
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        last = next(identity for data, identity in reversed(events[:-6]) if identity)
        behind = [identity for _, identity in events].index(last) + 1
        rest = await resumed(theirs, public_id(events), last)
    for choice in range(4):
        assert text_of(events[:behind], choice) + text_of(rest, choice) == texts[choice]


async def test_what_ends_the_text_can_be_part_of_it(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": HELLO, "stop": ["wor"], "include_stop_str_in_output": True}
    assert text(await http.post(CHAT, json=body)) == "Hello, wor"
    assert text(await http.post(CHAT, json=body | {"include_stop_str_in_output": False})) == "Hello, "
    assert text(await http.post(CHAT, json=body | {"min_tokens": 11})) == "Hello, world!"


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def test_a_stop_token_can_be_part_of_the_text(http: httpx.AsyncClient, ring: FakeRing) -> None:
    async def behave(fake: FakeRing, request: GenerationRequest) -> None:
        await fake.emit(request, 0, list(b"ab!"), finish="stop")

    ring.behave = behave
    body = {"model": MODEL, "messages": HELLO, "stop_token_ids": [ord("!")]}
    assert text(await http.post(CHAT, json=body | {"include_stop_str_in_output": True})) == "ab!"


async def test_tokens_that_may_come_reach_the_ring(http: httpx.AsyncClient, ring: FakeRing) -> None:
    body = {"min_tokens": 3, "max_tokens": 5, "allowed_token_ids": [97, 98], "bad_words": ["no", " bad"]}
    await http.post(CHAT, json={"model": MODEL, "messages": HELLO} | body)
    (request,) = ring.requests
    assert (request.sampling.min_tokens, request.sampling.allowed_token_ids) == (3, [97, 98])
    assert [bytes(word) for word in request.sampling.bad_words] == [b"no", b"bad"]
    assert request.stop_token_ids == [0]


@pytest.mark.parametrize(
    ("path", "asked", "first"),
    [
        (CHAT, {"messages": [HELLO[0] | {"weight": 1}], "max_tokens": 1, "logprobs": True}, "messages[0].weight"),
        ("/v1/responses", {"input": "Hi"}, "length_penalty"),
        ("/v1/responses", {"input": "Hi", "stream": True}, "length_penalty"),
    ],
)
async def test_vllms_fields_reach_whom_they_are_for_or_are_named(
    nats_settings: CommonSettings, ring: FakeRing, http: httpx.AsyncClient, path: str, asked: dict[str, Any], first: str
) -> None:
    fields = {"priority": -3, "cache_salt": "mine", "request_id": "req-mine", "length_penalty": 0.5}
    body = {"model": MODEL, "chat_template_kwargs": {"enable_thinking": False}} | fields | asked
    only = {"return_tokens_as_token_ids": True} if path == CHAT else {}
    answer = await http.post(path, json=body | only)
    assert answer.status_code == 200, answer.text
    (request,) = ring.requests
    assert (request.priority, request.request_id) == (-3, "req-mine")
    assert request.cache_salt.startswith("salt-")
    assert answer.headers.get_list("x-request-id") == ["req-mine"]
    named = ["messages[].weight"] if path == CHAT else []
    named += ["length_penalty", "chat_template_kwargs.enable_thinking"]
    assert answer.headers["x-ryzanstein-ignored-fields"] == ", ".join(named)
    if path == CHAT:
        tokens = answer.json()["choices"][0]["logprobs"]["content"]
        assert all(token["token"].startswith("token_id:") for token in tokens)
    async with run_gateway(nats_settings, strict_fields=True) as strict, strict.http() as client:
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, first)
        rest = body | {"length_penalty": None} | ({"messages": HELLO} if path == CHAT else {})
        refused = await client.post(path, json=rest)
        assert refused.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


async def test_a_prompt_is_made_as_asked(http: httpx.AsyncClient, ring: FakeRing) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    asked: list[dict[str, Any]] = [
        {"truncate_prompt_tokens": 2},
        {"messages": turns, "continue_final_message": True},
        {"truncate_prompt_tokens": -1, "max_tokens": 2046, "messages": [{"role": "user", "content": "abc"}]},
    ]
    for fields in asked:
        answer = await http.post(CHAT, json={"model": MODEL, "messages": HELLO} | fields)
        assert answer.status_code == 200, answer.text
    prompts = [bytes(request.prompt).decode() for request in ring.requests]
    assert prompts == ["i\n", "Hi\nOnce upon", "c\n"]


async def test_a_tier_is_a_lane_and_the_answer_names_it(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    tiers: list[Any] = ["auto", "default", "priority", "flex"]
    named = []
    for tier in tiers:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, service_tier=tier)  # type: ignore[arg-type]
        named.append(answer.service_tier)
    assert named == ["default", "default", "default", "flex"]
    assert [request.lane for request in ring.requests] == ["interactive"] * 3 + ["batch"]
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        service_tier="flex",  # type: ignore[arg-type]
    )
    assert {chunk.service_tier async for chunk in stream} == {"flex"}
    with pytest.raises(openai.BadRequestError, match="slow"):
        await client.chat.completions.create(model=MODEL, messages=HELLO, service_tier="slow")  # type: ignore[arg-type]


async def test_a_stored_answer_is_found_with_its_metadata(
    client: openai.AsyncOpenAI, nats_settings: CommonSettings
) -> None:
    made = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        store=True,
        metadata={"order": "66"},
        user="u",
        safety_identifier="s",  # type: ignore[arg-type]
    )
    plain = await client.chat.completions.create(model=MODEL, messages=HELLO)  # type: ignore[arg-type]
    async with run_gateway(nats_settings) as other, other.openai() as theirs:
        found = await theirs.chat.completions.retrieve(made.id)
        assert found.choices == made.choices
        assert found.metadata == {"order": "66"}
        with pytest.raises(openai.NotFoundError):
            await theirs.chat.completions.retrieve(plain.id)


async def test_usage_comes_with_every_chunk_and_counts_predictions(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,  # type: ignore[arg-type]
        stream=True,
        stream_options=options,
        prediction={"type": "content", "content": [{"type": "text", "text": "Hello, moon"}]},
    )
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert counts[-1] == 13
    assert bytes(ring.requests[0].prediction) == b"Hello, moon"
    details = usages[-1].completion_tokens_details if usages[-1] else None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 3)  # Hello, + " o"


async def test_chunks_are_padded_where_that_is_asked_for(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, "stream_options": {"include_obfuscation": True}}
    events = await streamed(http, CHAT, body)
    chunks = [data for data, _ in events if data != "[DONE]"]
    assert text_of(events) == "Hello, world!"
    assert finishes(events) == ["stop"]
    assert all("obfuscation" in json.loads(data) for data in chunks)
    assert {len(data) % 64 for data in chunks} == {0}


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_say_whether_they_are_exact(http: httpx.AsyncClient, ring: FakeRing, stream: bool) -> None:
    for name, exact in (("to-the-bit", True), ("nearly", False)):
        await ring.add_model(stub_card(name, exact=exact))
        await until_listed(http, name)
        body = {"model": name, "prompt": "a", "max_tokens": 3, "stream": stream}
        answer = await http.post("/v1/completions", json=body)
        assert answer.headers["x-ryzanstein-exact"] == str(exact).lower()
        key = {"Idempotency-Key": f"{name}-{stream}"}
        for _ in range(2):
            answer = await http.post("/v1/completions", json=body, headers=key)
            assert answer.headers["x-ryzanstein-exact"] == str(exact).lower(), "of a repeat too"


async def test_seeds_can_be_compared_by_the_fingerprint(http: httpx.AsyncClient, ring: FakeRing) -> None:
    await ring.add_model(stub_card("known", fingerprint="fp_0123456789"))
    await until_listed(http, "known")
    answer = (await http.post(CHAT, json={"model": "known", "messages": HELLO})).json()
    assert answer["system_fingerprint"] == "fp_0123456789"


async def test_what_cannot_be_done_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, fields, param in [
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"best_of": 100, "prompt": ["a", "b"]}, "best_of"),
        (COMPLETIONS, {"truncate_prompt_tokens": 4096}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [256]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [0], "min_tokens": 2}, "allowed_token_ids"),
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        (CHAT, {"verbosity": "low"}, "verbosity"),  # the stub has no template that could show it
        (CHAT, {"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
        (COMPLETIONS, {"min_tokens": 3, "guided_regex": "a|b"}, "min_tokens"),
        (COMPLETIONS, {"allowed_token_ids": [97], "guided_choice": ["a"]}, "allowed_token_ids"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"prediction": {"type": "content", "content": [{"type": "file"}]}}, "prediction.content[0].file"),
    ]:
        body = {"model": MODEL, "prompt": "x"} if path == COMPLETIONS else {"model": MODEL, "messages": HELLO}
        async with gateway.http() as http:
            answer = await http.post(path, json=body | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_token_ids_and_what_ended_the_text_are_shown_on_any_gateway(
    http: httpx.AsyncClient, nats_settings: CommonSettings, path: str
) -> None:
    asked: dict[str, Any] = {"prompt": "xy"} if path == COMPLETIONS else {"messages": HELLO}
    body = {"model": MODEL, "return_token_ids": True, "stop": ["w"], "n": 2} | asked
    whole = (await http.post(path, json=body)).json()
    prompt = [*b"xy"] if path == COMPLETIONS else [*b"Hi\n"]
    told = [whole] if path == CHAT else whole["choices"]
    assert [one["prompt_token_ids"] for one in told] == [prompt] * len(told)
    for choice in whole["choices"]:
        assert (choice["token_ids"], choice["stop_reason"]) == ([*b"Hello, w"], "w")
    events = await streamed(http, path, body | {"stream": True, "n": 1})
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        rest = await resumed(theirs, public_id(events), events[2][1])
    for way in (events, events[:3] + rest):
        chunks = [json.loads(data) for data, _ in way if data != "[DONE]"]
        choices = [chunk["choices"][0] for chunk in chunks]
        told = chunks if path == CHAT else choices
        assert [one.get("prompt_token_ids") for one in told] == [prompt] + [None] * (len(chunks) - 1)
        assert [token for choice in choices for token in choice.get("token_ids", ())] == [*b"Hello, w"]
        assert ["stop_reason" in choice for choice in choices] == [False] * (len(chunks) - 1) + [True]
        assert choices[-1]["stop_reason"] == "w"


async def test_each_candidate_is_shown_with_its_own_prompt(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = candidates
    body = {"prompt": ["x", "y"], "best_of": 2, "echo": True, "return_token_ids": True, "stop_token_ids": [49, 51]}
    choices = (await http.post(COMPLETIONS, json={"model": MODEL} | body)).json()["choices"]
    assert [one["prompt_token_ids"] for one in choices] == [[120], [121]]
    assert [one["token_ids"] for one in choices] == [[49, 49], [51, 51]]
    assert [one["stop_reason"] for one in choices] == [49, 51]


async def test_an_echoed_prompt_comes_with_its_token_ids(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "echo": True, "return_token_ids": True, "stream": True}
    events = await streamed(http, COMPLETIONS, body)
    first = json.loads(events[0][0])["choices"][0]
    assert (first["text"], first["prompt_token_ids"], first["token_ids"]) == ("x", [120], [])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_tells_by_the_fingerprint_that_another_ring_goes_on(
    http: httpx.AsyncClient, nats_settings: CommonSettings, ring: FakeRing, path: str
) -> None:
    async def speak(fake: FakeRing, request: GenerationRequest) -> None:
        at = len(request.generated)
        await fake.emit(request, at, [], fingerprint=("fp_one", "fp_two")[request.attempt])
        if request.attempt:
            await fake.emit(request, at, list(b"lo"), finish="stop")
            return
        await fake.emit(request, 0, list(b"Hel"))
        await read.wait()
        await fake.emit(request, 3, [], finish="error", error=("", "lost", True))

    read = asyncio.Event()
    ring.behave = speak
    asked: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    told: dict[str, list[str]] = {"Hel": [], "lo": []}
    async with http.stream("POST", path, json=asked | {"model": MODEL, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            told["lo" if read.is_set() else "Hel"].append(chunk["system_fingerprint"])
            if text_of([(line.removeprefix("data: "), "")]) == "Hel":
                read.set()
    assert {name: set(prints) for name, prints in told.items()} == {"Hel": {"fp_one"}, "lo": {"fp_two"}}
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        state = (await theirs.get(f"/v1/generations/{chunk['id']}")).json()["response"]
    assert state["system_fingerprint"] == "fp_two"
    shown = state["choices"][0]
    assert (shown["text"] if path == COMPLETIONS else shown["message"]["content"]) == "Hello"

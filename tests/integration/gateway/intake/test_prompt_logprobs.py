"""Log probabilities of prompts as clients see them: OpenAI's `echo`, vLLM's `prompt_logprobs`, streams, lost rings."""

import json
import struct
from typing import Any

import httpx
import pytest
from msgspec import structs

from services.gateway.streams import stream_reader
from shared import limits
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, halting, say, until
from tests.integration.gateway.resuming import finishes, public_id, resumed, streamed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def scores_of(request: GenerationRequest) -> bytes:
    """Token t at position p has the log probability -p, the rank p + 1 and the letters from "a" on before it."""
    top = request.prompt_logprobs
    rows = [
        struct.pack("<fi" + top * "if", -at, at + 1, *(value for k in range(top) for value in (97 + k, -k / 2)))
        for at in range(1, len(request.prompt))
    ]
    return b"".join(rows)


async def scoring(ring: FakeRing, request: GenerationRequest, text: bytes = b"ok", finish: str = "") -> None:
    """Says what the prompt's tokens come to with the first token, as a ring does; twice, as a network may."""
    wanted = request.prompt_logprobs >= 0 and not request.generated
    begin = len(request.generated)
    tokens = list(text)[begin : request.max_tokens]
    end = finish or ("length" if begin + len(tokens) == request.max_tokens else "stop")
    for _ in range(2):
        await ring.emit(request, begin, tokens, finish=end, prompt_scores=scores_of(request) if wanted else b"")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def scored(ring: FakeRing) -> None:
    ring.behave = scoring


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await http.post(path, json={"model": MODEL} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_echo_has_the_prompts_tokens_too(http: httpx.AsyncClient, ring: FakeRing) -> None:
    body = {"prompt": "xyz", "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    (choice,) = (await ask(http, COMPLETIONS, **body))["choices"]
    assert choice["text"] == "xyzok"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z", "o", "k"],
        "text_offset": [0, 1, 2, 3, 4],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"a": 0.0, "b": -0.5, "y": -1.0},
            {"a": 0.0, "b": -0.5, "z": -2.0},
            {"a": -1.0, "b": -2.0, "o": -0.5},
            {"a": -1.0, "b": -2.0, "k": -0.5},
        ],
    }
    assert choice["prompt_logprobs"] is None
    (request,) = ring.requests
    assert (request.prompt_logprobs, request.sampling.logprobs) == (2, 2)


async def test_a_prompt_alone_can_be_scored(http: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await ask(http, COMPLETIONS, prompt=[[5, 6], [7, 8, 9]], echo=True, logprobs=0, max_tokens=0)
    assert [one["logprobs"]["token_logprobs"] for one in answer["choices"]] == [[None, -1.0], [None, -1.0, -2.0]]
    assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 0
    assert [request.max_tokens for request in ring.requests] == [0, 0]


async def test_a_prompt_may_fill_the_context_where_nothing_follows(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": [5] * 2048, "echo": True, "logprobs": 0, "max_tokens": 0}
    assert len((await ask(http, COMPLETIONS, **body))["choices"][0]["logprobs"]["tokens"]) == 2048
    assert (await http.post(COMPLETIONS, json=body | {"max_tokens": 1})).status_code == 400
    assert (await http.post(COMPLETIONS, json=body | {"prompt": [5] * 2049})).status_code == 400


async def test_an_echo_alone_asks_for_nothing(http: httpx.AsyncClient, ring: FakeRing) -> None:
    (choice,) = (await ask(http, COMPLETIONS, prompt="xyz", echo=True, max_tokens=0))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("xyz", None)
    assert [request.prompt_logprobs for request in ring.requests] == [-1]


async def test_vllms_list_of_a_completion(http: httpx.AsyncClient, ring: FakeRing) -> None:
    answer = await ask(http, COMPLETIONS, prompt=["xy", "b"], prompt_logprobs=1, max_tokens=1, n=2)
    assert [one["prompt_logprobs"] for one in answer["choices"]] == [
        [
            None,
            {
                "121": {"logprob": -1.0, "rank": 2, "decoded_token": "y"},
                "97": {"logprob": 0.0, "rank": 1, "decoded_token": "a"},
            },
        ]
    ] * 2 + [[None]] * 2
    assert all(one["logprobs"] is None for one in answer["choices"])
    assert {request.prompt_logprobs for request in ring.requests} == {1}


async def test_vllms_list_of_a_chat(http: httpx.AsyncClient) -> None:
    answer = await ask(http, CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=1)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {"105": {"logprob": -1.0, "rank": 2, "decoded_token": "i"}}
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_both_at_once_have_what_each_asks_for(http: httpx.AsyncClient, ring: FakeRing) -> None:
    body = {"prompt": "xy", "echo": True, "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 1}
    (choice,) = (await ask(http, COMPLETIONS, **body))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"y": -1.0}, {"o": -0.5}]
    assert list(choice["prompt_logprobs"][1]) == ["121", "97", "98"]
    assert [request.prompt_logprobs for request in ring.requests] == [2]


async def test_large_answers_are_made_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "xyz", "echo": True, "logprobs": 1, "max_tokens": 1}
    at_once = await ask(http, COMPLETIONS, **body)
    monkeypatch.setattr(stream_reader, "LARGE", 1)
    assert (await ask(http, COMPLETIONS, **body))["choices"] == at_once["choices"]
    events = await streamed(http, COMPLETIONS, {"model": MODEL, "stream": True} | body)
    assert merged(events) == [without(one) for one in at_once["choices"]]
    state = (await http.get(f"/v1/generations/{public_id(events)}")).json()
    assert state["response"]["choices"] == at_once["choices"]


# --- what ends a text ----------------------------------------------------------------------------


async def nothing_but_the_end(ring: FakeRing, request: GenerationRequest) -> None:
    await scoring(ring, request, b"\0", "stop")


async def test_nothing_to_score_is_an_empty_object(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = nothing_but_the_end
    answer = await ask(http, COMPLETIONS, prompt="xy", logprobs=1)
    empty: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    assert answer["choices"][0]["logprobs"] == empty
    answer = await ask(http, CHAT, messages=HELLO, logprobs=True)
    assert answer["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert (await ask(http, CHAT, messages=HELLO))["choices"][0]["logprobs"] is None
    assert (await ask(http, COMPLETIONS, prompt="xy"))["choices"][0]["logprobs"] is None


async def test_behind_an_echo_the_token_that_ends_the_text_is_scored_too(
    http: httpx.AsyncClient, ring: FakeRing
) -> None:
    """Whoever asks for one token to have its prompt scored counts from the end: there must be one."""
    ring.behave = nothing_but_the_end
    (choice,) = (await ask(http, COMPLETIONS, prompt="xy", echo=True, logprobs=0, max_tokens=1))["choices"]
    assert choice["text"] == "xy"
    assert choice["logprobs"]["tokens"] == ["x", "y", "\0"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


# --- streams, other gateways, lost rings ---------------------------------------------------------

STREAMED = {"model": MODEL, "prompt": ["xyz", "b"], "echo": True, "logprobs": 1, "stream": True, "max_tokens": 4}


def merged(events: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The choices that a stream's chunks come to, without their ends."""
    found: dict[int, dict[str, Any]] = {}
    for data, _ in events:
        for item in [] if data == "[DONE]" else json.loads(data)["choices"]:
            choice = found.setdefault(item["index"], {"index": item["index"], "text": "", "logprobs": {}})
            choice["text"] += item["text"]
            for name, values in (item["logprobs"] or {}).items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return [found[index] for index in sorted(found)]


def without(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("index", "text", "logprobs")}


async def in_parts(ring: FakeRing, request: GenerationRequest) -> None:
    """A frame for each token."""
    for count in range(len(request.generated) + 1, 5):
        tokens = [b"okay"[count - 1]]
        scores = scores_of(request) if count == 1 and request.prompt_logprobs >= 0 else b""
        await ring.emit(request, count - 1, tokens, finish="length" if count == 4 else "", prompt_scores=scores)


async def test_a_stream_tells_the_same_wherever_it_is_resumed(
    http: httpx.AsyncClient, ring: FakeRing, nats_settings: CommonSettings
) -> None:
    ring.behave = in_parts
    whole = await ask(http, COMPLETIONS, **(STREAMED | {"stream": False}))
    expected = [without(one) for one in whole["choices"]]
    assert [one["text"] for one in expected] == ["xyzokay", "bokay"]
    events = await streamed(http, COMPLETIONS, STREAMED)
    assert merged(events) == expected
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        for behind in range(len(events)):
            position = events[behind - 1][1] if behind else ""
            if behind and not position:
                continue
            rest = await resumed(theirs, public_id(events), position)
            assert merged(events[:behind] + rest) == expected


async def test_a_stream_of_a_prompt_alone(http: httpx.AsyncClient, nats_settings: CommonSettings) -> None:
    body = {**STREAMED, "prompt": "xyz", "max_tokens": 0}
    events = await streamed(http, COMPLETIONS, body)
    (choice,) = merged(events)
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("xyz", [None, -1.0, -2.0])
    assert finishes(events) == ["length"]
    async with run_gateway(nats_settings) as other, other.http() as theirs:
        rest = await resumed(theirs, public_id(events), events[0][1])
    assert "".join(one["text"] for one in merged(rest)) == ""
    assert finishes(rest) == ["length"]


@pytest.mark.parametrize("said", [0, 2])
async def test_a_lost_ring_changes_nothing(http: httpx.AsyncClient, ring: FakeRing, said: int) -> None:
    """Before its first token the next ring tells of the prompt again; behind it nobody asks for that any more."""

    async def dying(fake: FakeRing, request: GenerationRequest) -> None:
        if request.attempt:
            await scoring(fake, request, b"okay")
            return
        await fake.emit(request, 0, list(b"okay")[:said], prompt_scores=scores_of(request) if said else b"")
        await fake.lose()

    ring.behave = dying
    body = {"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 4, "prompt_logprobs": 1}
    (choice,) = (await ask(http, COMPLETIONS, **body))["choices"]
    assert choice["text"] == "xyzokay"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * 4]
    assert [None if one is None else list(one) for one in choice["prompt_logprobs"]] == [
        None,
        ["121", "97"],
        ["122", "97"],
    ]
    assert [len(request.generated) for request in ring.requests] == [0, said]


async def test_a_prompt_alone_whose_end_is_lost_is_scored_again(http: httpx.AsyncClient, ring: FakeRing) -> None:
    """That nothing is generated does not mean that nothing is missing."""
    ring.behave = halting(FakeRing.lose, b"", scoring)
    (choice,) = (await ask(http, COMPLETIONS, prompt="xyz", echo=True, logprobs=0, max_tokens=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    await until(lambda: len(ring.requests) == 2)


async def test_prompts_that_nobody_asks_about_are_not_scored(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = say
    for fields in ({"echo": True}, {"logprobs": 3}, {"best_of": 2, "echo": True}):
        await ask(http, COMPLETIONS, prompt="xyz", max_tokens=2, **fields)
    assert {request.prompt_logprobs for request in ring.requests} == {-1}


async def test_what_is_refused(http: httpx.AsyncClient, ring: FakeRing, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, fields, param, words in [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "'echo' or 'prompt_logprobs'"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens", ">= 0"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
        (COMPLETIONS, {"prompt_logprobs": 20, "prompt": [[5] * 1600]}, "prompt_logprobs", "limit prompt_logprobs: 30,"),
        (
            COMPLETIONS,
            {"logprobs": 20, "echo": True, "prompt": [[5] * 1000] * 3},
            "logprobs",
            "request_prompt_logprobs: 60,",
        ),
        (CHAT, {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", ">= 1"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    ]:
        for name, value in (("PROMPT_LOGPROBS", 30_000), ("REQUEST_PROMPT_LOGPROBS", 60_000)):
            monkeypatch.setattr(limits, name, structs.replace(getattr(limits, name), value=value))
        given = {"messages": HELLO} if path == CHAT else {"prompt": "xyz"}
        answer = await http.post(path, json={"model": MODEL} | given | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert words in answer.json()["error"]["message"]
        assert not ring.requests

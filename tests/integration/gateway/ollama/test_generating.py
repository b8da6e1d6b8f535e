"""Ollama's Python client: chats, prompts and vectors; what lines say besides, and what is refused by its name."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, saying, stub_card, until
from tests.integration.gateway.intake.test_embeddings import embed, vector
from tests.integration.gateway.intake.test_tools import TEXT as CALLS
from tests.integration.gateway.intake.test_tools import TOOLS
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HI}
GENERATION, POSITIONS = "x-ryzanstein-generation", {"X-Ryzanstein-Positions": "true"}


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[ollama.AsyncClient]:
    made = ollama.AsyncClient(host=gateway.url, timeout=20)
    yield made
    await made._client.aclose()


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(line["message"]["content"] for line in lines)


async def refused(http: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str]:
    answer = await http.post(path, json={"model": MODEL} | body)
    told: dict[str, str] = answer.json()
    assert list(told) == ["error"]
    return answer.status_code, told["error"]


async def test_a_chat_as_a_whole(client: ollama.AsyncClient, ring: FakeRing) -> None:
    options = {"num_predict": 9000, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7}
    more = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "stop": ["ld"], "num_ctx": 512}
    answer = await client.chat(f"{MODEL}:latest", HI, options=options | more)
    assert answer.message.content == "Hello, wor"
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (3, 12)
    assert all((answer.total_duration, answer.eval_duration, answer.prompt_eval_duration))
    assert answer.eval_duration == answer.total_duration, "when its first token came is not known"
    (request,) = ring.requests
    sampling = request.sampling
    assert request.max_tokens == 2048 - 3, "lowered to what the context leaves"
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (7, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)


async def test_a_stream_is_the_default_and_says_what_others_do_not(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = saying("Hello")
    answer = await http.post(CHAT, json=BODY | {"options": {"num_predict": 5, "num_thread": 4, "of_nobody": 1}})
    lines = lines_of(answer)
    assert text_of(lines) == "Hello"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == "length"
    assert not any("position" in line for line in lines)
    assert answer.headers["x-ryzanstein-ignored-fields"] == "options.num_thread"
    again = await http.get(f"/v1/generations/{answer.headers[GENERATION]}/stream", headers=POSITIONS)
    assert text_of(lines_of(again)) == "Hello"
    assert lines_of(again)[-1]["position"] == "7"
    state = (await http.get(f"/v1/generations/{answer.headers[GENERATION]}")).json()
    assert (state["endpoint"], state["response"]["message"]["content"]) == ("ollama.chat", "Hello")
    assert state["response"]["done"]
    wrong = await http.post(CHAT, json=BODY, headers={"X-Ryzanstein-Positions": "perhaps"})
    assert wrong.status_code == 400
    assert "expected true or false" in wrong.json()["error"]


async def test_calls_come_whole_and_their_results_find_them(
    client: ollama.AsyncClient, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    ring.behave = saying(CALLS)
    body = BODY | {"tools": TOOLS}
    lines = lines_of(await http.post(CHAT, json=body))
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [
        {"index": 0, "name": "get_weather", "arguments": {"city": "Rome", "days": 2}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert (text_of(lines).strip(), lines[-1]["done_reason"]) == ("Let me see.", "stop")
    answer = await client.chat(MODEL, HI, tools=TOOLS)
    assert answer.message.tool_calls is not None
    ring.behave = saying("Sunny.")
    results = [
        ollama.Message(role="tool", content="12:00", tool_name="now"),
        ollama.Message(role="tool", content="sun", tool_name="get_weather"),
    ]
    last = await client.chat(MODEL, [*HI, answer.message, *results], tools=TOOLS)
    assert last.message.content == "Sunny."
    prompt = bytes(ring.requests[-1].prompt).decode("latin-1")
    assert prompt.index("sun") > prompt.index("12:00") > prompt.index("get_weather")
    with pytest.raises(ollama.ResponseError, match="needs a call before it"):
        await client.chat(MODEL, [*HI, results[0]])


async def test_a_call_that_is_cut_off_is_shown_as_text(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = saying('<tool_call>\n{"name": "now", "arguments": {"zone": "UT')
    answer = await http.post(CHAT, json=BODY | {"tools": TOOLS, "stream": False})
    message = answer.json()["message"]
    assert "tool_calls" not in message
    assert message["content"].startswith('{"name":"now","arguments":{"zone"')


async def test_a_prompt_with_and_without_a_template(client: ollama.AsyncClient, ring: FakeRing) -> None:
    answer = await client.generate(MODEL, "Hi", system="Be kind.", options={"seed": -1})
    assert (answer.response, answer.done_reason, answer.eval_count) == ("Hello, world!", "stop", 13)
    raw = [part async for part in await client.generate(MODEL, "Hi", raw=True, stream=True)]
    assert "".join(part.response or "" for part in raw) == "Hello, world!"
    assert [bytes(request.prompt) for request in ring.requests] == [b"Be kind.\nHi\n", b"Hi"]
    assert ring.requests[1].max_tokens == 2048 - 2, "to the end of the context, as a chat"


async def test_formats_are_grammars(client: ollama.AsyncClient, ring: FakeRing) -> None:
    ring.behave = saying('{"age": 3}')
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    assert (await client.chat(MODEL, HI, format=schema)).message.content == '{"age": 3}'
    await client.generate(MODEL, "Hi", format="json")
    await client.generate(MODEL, "Hi", format="", raw=True)
    kinds = [request.grammar.kind if request.grammar else "" for request in ring.requests]
    assert kinds == ["json_schema", "json_schema", ""]


async def test_log_probabilities(client: ollama.AsyncClient) -> None:
    answer = await client.chat(MODEL, HI, logprobs=True, top_logprobs=1)
    assert [one.token for one in answer.logprobs] == list("Hello, world!")
    assert (answer.logprobs[0].logprob, answer.logprobs[0].top_logprobs[0].token) == (-0.5, "a")
    parts = [part async for part in await client.generate(MODEL, "Hi", raw=True, stream=True, logprobs=True)]
    assert "".join(one.token for part in parts for one in part.logprobs or ()) == "Hello, world!"


async def test_vectors(gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = embed
    await ring.add_model(stub_card("embedder", embedding_size=4))
    await until_listed(http, "embedder")
    async with ollama.AsyncClient(host=gateway.url, timeout=20) as client:
        two = await client.embed("embedder", ["Hi", "There"])
        assert [list(one) for one in two.embeddings] == [pytest.approx(vector([ord(one)])) for one in "HT"]
        assert two.prompt_eval_count == 7
        one = await client.embeddings("embedder", "Hi")
        assert list(one.embedding) == pytest.approx(vector([ord("H")]))
        assert (await client.embed("embedder", [])).embeddings == []
        long = await client.embed("embedder", "x" * 5000)
        assert long.prompt_eval_count == 2048
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            await client.embed("embedder", "x" * 5000, truncate=False)
    assert (await http.post("/api/embeddings", json={"model": "embedder"})).json() == {"embedding": []}


async def test_what_is_refused_and_how(http: httpx.AsyncClient, client: ollama.AsyncClient) -> None:
    assert await refused(http, CHAT, model="nobody:latest", messages=HI) == (404, "model 'nobody:latest' not found")
    assert await refused(http, CHAT, messages=HI, max_tokens=3) == (
        400,
        "Unknown parameter: 'max_tokens'; this API has 'options.num_predict' for it.",
    )
    for name, value in {"context": [1], "template": "{{ .Prompt }}", "suffix": "x", "images": ["aGk="]}.items():
        status, why = await refused(http, GENERATE, prompt="Hi", **{name: value})
        assert (status, f"'{name}'" in why) == (400, True), why
    seen = [*HI, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "", "images": ["aGk="]}]
    assert "'messages[2].images' is not supported" in (await refused(http, CHAT, messages=seen))[1]
    assert "'options.typical_p'" in (await refused(http, CHAT, messages=HI, options={"typical_p": 0.5}))[1]
    assert "'options.temperature'" in (await refused(http, CHAT, messages=HI, options={"temperature": 9}))[1]
    assert "'format'" in (await refused(http, CHAT, messages=HI, format={"type": "nonsense"}))[1]
    assert "your prompt resulted in 5001 tokens" in (await refused(http, GENERATE, prompt="x" * 5000))[1]
    assert "'system'" in (await refused(http, GENERATE, prompt="Hi", raw=True, system="Be kind."))[1]
    assert (await refused(http, CHAT, messages=HI, think=True))[1] == f'"{MODEL}" does not support thinking'
    assert (await refused(http, CHAT, messages=HI, keep_alive="soon"))[0] == 400
    assert (await client.chat(MODEL, HI, think=False)).message.content == "Hello, world!"
    with pytest.raises(ollama.ResponseError) as error:
        await client.chat("nobody", HI)
    assert error.value.status_code == 404


async def test_an_error_in_the_middle_is_a_line(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = failing("unavailable", "It broke.", behind=b"H")
    lines = lines_of(await http.post(CHAT, json=BODY))
    assert lines[0]["message"]["content"] == "H"
    assert lines[-1] == {"error": "It broke."}


async def test_a_stream_is_resumed_after_its_gateway_was_killed(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    """The ring comes last: the first process of a test run takes its time, and nothing else goes on meanwhile."""
    ring = FakeRing(bus)
    headers = {"Idempotency-Key": "once", **POSITIONS}
    seen: list[dict[str, Any]] = []
    async with gateway_process(bus, nats_settings, tmp_path) as doomed, run_gateway(nats_settings) as gateway:
        ring.behave = paced = Paced(b"The log is the thing.", 8)
        await ring.start()
        await until_listed(doomed.http, MODEL)
        async with doomed.http.stream("POST", CHAT, json=BODY, headers=headers) as answer:
            async for line in answer.aiter_lines():
                seen.append(json.loads(line))
                if text_of(seen) == "The log ":
                    break
        await doomed.kill()
        paced.allow()
        async with gateway.http() as http:
            last = headers | {"Last-Event-ID": seen[-1]["position"]}
            rest = lines_of(await http.post(CHAT, json=BODY, headers=last))
            whole = await http.post(CHAT, json=BODY, headers=headers)
        await ring.stop()
    assert text_of(seen) + text_of(rest) == "The log is the thing." == text_of(lines_of(whole))
    assert [line["done_reason"] for line in rest if line["done"]] == ["stop"]
    assert len(ring.requests) == 1


async def test_without_messages_a_model_is_loaded(
    gateway: RunningGateway, client: ollama.AsyncClient, ring: FakeRing
) -> None:
    await ring.put_record("ready")
    catalog = gateway.service.work.catalog
    await until(lambda: catalog.has_ready_group(MODEL))
    assert (await client.chat(MODEL)).done_reason == "load"
    answer = await client.generate(MODEL, keep_alive="5m")
    assert (answer.response, answer.done_reason) == ("", "load")
    with pytest.raises(ollama.ResponseError, match="executor that was started with it"):
        await client.chat(MODEL, keep_alive=0)


async def test_strict_fields_refuse_what_changes_nothing(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, strict_fields=True) as strict, strict.http() as http:
        await until_listed(http, MODEL)
        assert "'options.num_ctx'" in (await refused(http, CHAT, messages=HI, options={"num_ctx": 9}))[1]
        assert "'keep_alive'" in (await refused(http, CHAT, messages=HI, keep_alive=5))[1]

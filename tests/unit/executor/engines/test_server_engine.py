"""Engines behind a URL, against a server that says what each test wants."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from services.executor.engines.base import EngineDelta, EngineRequest
from services.executor.engines.catalog import CANNOT
from services.executor.engines.server import generation as generations
from services.executor.engines.server import watch
from services.executor.engines.server.client import ServerClient
from services.executor.engines.server.dialects.catalog import DIALECTS
from services.executor.engines.server.dialects.vllm import VllmDialect
from services.executor.engines.server.engine import ServerEngine, make_server_engine
from shared.errors import ConfigurationError, ModelLoadError, RingLost, RyzansteinError, Unavailable
from shared.messages import Grammar, SamplingParams, TokenLogprobs
from tests.unit.executor.engines.scripted_server import VOCAB, Exchange, ScriptedServer, event

KINDS = list(DIALECTS)
NEVER = 1e6  # seconds
SAMPLED = SamplingParams(0.5, 4, 0.9, 0.1, (1 << 64) - 1, 1.1, 0.2, 0.3, {5: 2.0}, 2, 6, [1, 2], [[3, 4]])
SAMPLED_TOLD: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": (1 << 64) - 1,
    "min_tokens": 6,
}
SAMPLED_TOLD |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": 2.0}}
SAMPLED_TOLD |= {"allowed_token_ids": [1, 2], "bad_words": [[3, 4]]}


def asked(name: str = "a", **fields: Any) -> EngineRequest:
    return EngineRequest(name, [1, 2, 3], 3, fields.pop("max_tokens", 8), **fields)


@asynccontextmanager
async def serving(
    kind: str = "vllm", *, health: float = NEVER, identity: float = NEVER, places: int = 4, start: bool = True
) -> AsyncIterator[tuple[ScriptedServer, ServerEngine]]:
    with patch.multiple(watch, HEALTH_SECONDS=health, IDENTITY_SECONDS=identity):
        async with ScriptedServer(kind) as server:
            client = ServerClient(server.url, None, places)
            engine = ServerEngine(DIALECTS[kind](client), client, VOCAB, 32, places)
            try:
                if start:
                    await engine.start()
                yield server, engine
            finally:
                await engine.stop()
                await engine.stop()


async def answers(engine: ServerEngine, *names: str) -> dict[str, list[EngineDelta]]:
    """All deltas of the requests until their ends."""
    deltas: dict[str, list[EngineDelta]] = {}
    while not all(name in deltas and deltas[name][-1].finish for name in names):
        for delta in (await engine.next()).deltas:
            deltas.setdefault(delta.id, []).append(delta)
    return deltas


async def failed(engine: ServerEngine, request: EngineRequest) -> EngineDelta:
    engine.submit(request)
    delta = (await answers(engine, request.id))[request.id][-1]
    assert delta.finish == "error"
    return delta


def tokens_of(deltas: list[EngineDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def server_info(
    dtype: str = "float32", cache: str = "auto", device: str = "cpu", quantization: str | None = None, **env: Any
) -> dict[str, Any]:
    model = {"dtype": f"torch.{dtype}", "quantization": quantization}
    config = {"model_config": model, "cache_config": {"cache_dtype": cache}, "device_config": {"device": device}}
    return {"vllm_config": config, "vllm_env": env}


def sends(
    *events: dict[str, Any] | bytes, until: Callable[[Exchange], Awaitable[None]] = Exchange.end
) -> Callable[[Exchange], Awaitable[None]]:
    async def script(exchange: Exchange) -> None:
        await exchange.send(*events)
        await until(exchange)

    return script


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_streamed(kind: str) -> None:
    async with serving(kind, start=False) as (server, engine):
        facts = await engine.start()
        assert facts.vocab_size == VOCAB
        assert facts.context_length == 32
        assert facts.places == (4 if kind == "vllm" else 2)
        assert facts.kv_tokens == {"vllm": 160, "llama.cpp": 128, "sglang": 0}[kind]
        assert not facts.exact
        cannot = CANNOT[{"vllm": "vLLM by URL", "sglang": "SGLang"}.get(kind, kind)]
        assert sorted(facts.unsupported) == sorted({"pooling", *cannot})  # a model that generates
        whole = kind == "sglang"  # which tells all tokens with each event
        last = event(kind, [5, 6, 7, 8] if whole else [7, 8], "length", 4)
        server.script = sends(b": ping\n\n", event(kind, [5, 6], count=2), last, b"data: [DONE]\r\n\r\n")
        for name in "ab":
            engine.submit(asked(name))
        told = await answers(engine, "a", "b")
        assert tokens_of(told["a"]) == tokens_of(told["b"]) == [5, 6, 7, 8]
        assert told["a"][-1].finish == "length"
        assert max(delta.cached_tokens for delta in told["a"]) == 3


async def test_sglang_may_send_new_tokens_alone_and_take_the_last_one_off() -> None:
    async with serving("sglang") as (server, engine):
        last = event("sglang", [], "stop", 3)
        last["meta_info"]["finish_reason"]["matched"] = 9
        server.script = sends(event("sglang", [5], count=1), event("sglang", [6], count=2), last)
        engine.submit(asked(stop_token_ids=[9]))
        told = (await answers(engine, "a"))["a"]
        assert tokens_of(told) == [5, 6, 9]
        assert told[-1].finish == "stop"


ABORTS = [(400, "invalid_request"), (503, "unavailable"), (500, "internal_error"), (None, "unavailable")]


@pytest.mark.parametrize("logprobs", [-1, 1])
@pytest.mark.parametrize(("status", "code"), ABORTS)
async def test_what_sglang_aborts_is_told_and_its_filler_is_no_token(
    status: int | None, code: str, logprobs: int
) -> None:
    """As 0.5.23 answers a prompt that is too long: with a token, and without log probabilities."""
    async with serving("sglang") as (server, engine):
        aborted = event("sglang", [0], "abort", 1)
        aborted["meta_info"]["finish_reason"] |= {"message": "Input length exceeds 8186.", "status_code": status}
        server.script = sends(aborted)
        delta = await failed(engine, asked(sampling=SamplingParams(logprobs=logprobs)))
        assert (delta.tokens, delta.code) == ([], code)
        assert delta.error.endswith("it aborted the request: Input length exceeds 8186")


async def test_sglang_tells_of_wrong_numbers_as_of_a_stop_string() -> None:
    async with serving("sglang") as (server, engine):
        last = event("sglang", [5, 9], "stop", 2)
        last["meta_info"]["finish_reason"]["matched"] = "NaN happened"
        server.script = sends(event("sglang", [5], count=1), last)
        delta = await failed(engine, asked(stop_token_ids=[9]))
        assert "NaN happened" in delta.error
        assert 9 not in delta.tokens


async def test_sglang_takes_no_prompt_of_its_whole_context() -> None:
    async with serving("sglang", start=False) as (server, engine):
        server.told["/get_server_info"] |= {"max_req_input_len": 26}
        assert (await engine.start()).context_length == 26


async def test_sglang_tells_log_probabilities_where_they_are_the_models() -> None:
    async with serving("sglang", start=False) as (server, engine):
        server.tempered = True
        assert (await engine.start()).unsupported == [*CANNOT["SGLang"], "logprobs"]


async def test_vllm_is_asked_for_tokens_where_it_offers_that_and_is_exact_with_our_processor() -> None:
    async with serving(start=False) as (server, engine):
        server.told["/inference/v1/generate"] = True
        server.told["/server_info?config_format=json"] = server_info()
        server.refused_seeds = ("-1",)
        facts = await engine.start()
        assert facts.exact
        assert facts.unsupported == ["pooling", *CANNOT["vLLM by URL with our processor"]]
        assert facts.numerics == "vLLM 0.32.0 dtype=float32 abc"
        server.script = sends(event("vllm", [5], "stop"))
        engine.submit(asked())
        await answers(engine, "a")
        assert server.asked[-1] == "/inference/v1/generate"
        server.refused_seeds = ("-1", "1")
        with pytest.raises(ConfigurationError, match="does not know what it is told"):
            await engine.start()


TOP = TokenLogprobs(-0.5, [(6, -0.25), (5, -0.5)])
NAMED = {"token_id:5": -0.5, "token_id:6": -0.25, "token_id:7": -9.0}
PAIRS = [[-0.25, 6, None], [-0.5, 5, None], [-9.0, 7, None]]
OBJECTS = [{"id": 6, "logprob": -0.25}, {"id": 5, "logprob": -0.5}]
LOGPROBS: dict[str, Any] = {
    "vllm": {"token_logprobs": [-0.5], "top_logprobs": [NAMED]},
    "sglang": {"output_token_logprobs": [[-0.5, 5, None]], "output_top_logprobs": [PAIRS]},
    "llama.cpp": [{"id": 5, "logprob": -0.5, "top_logprobs": OBJECTS}],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_are_of_each_token(kind: str) -> None:
    async with serving(kind) as (server, engine):
        server.script = sends(event(kind, [5], "stop", 1, LOGPROBS[kind]))
        engine.submit(asked(sampling=SamplingParams(logprobs=2)))
        told = (await answers(engine, "a"))["a"]
        assert [delta.logprobs for delta in told if delta.tokens] == [[TOP]]
        server.script = sends(event(kind, [5, 6], "stop", 2, LOGPROBS[kind]))
        wrong = await failed(engine, asked("b", sampling=SamplingParams(logprobs=2)))
        assert "log probabilities for 2 tokens" in wrong.error


async def test_an_abort_closes_the_connection() -> None:
    async with serving() as (server, engine):
        closed = asyncio.Event()

        async def until(exchange: Exchange) -> None:
            await exchange.closed_by_client()
            closed.set()

        server.script = sends(event("vllm", [5]), until=until)
        engine.submit(asked())
        assert tokens_of((await engine.next()).deltas) == [5]
        engine.abort(["a", "unknown"])
        await closed.wait()


async def test_no_more_requests_than_places_are_at_the_server_and_none_for_nothing() -> None:
    async with serving(places=1) as (server, engine):
        server.script = sends(event("vllm", [5]), event("vllm", [6], "stop"))
        engine.submit(asked("nothing", max_tokens=0))
        assert (await engine.next()).deltas == [EngineDelta("nothing", finish="length")]
        for name in "abc":
            engine.submit(asked(name))
        step = await engine.next()
        assert (step.running, step.waiting) == (1, 2)
        assert server.asked.count("/v1/completions") == 4 + 1  # four of them at the start
        assert set(await answers(engine, *"bc")) >= {"b", "c"}


async def test_a_stop_token_that_the_server_does_not_know_ends_the_answer() -> None:
    async with serving("llama.cpp") as (server, engine):
        server.script = sends(event("llama.cpp", [5, 9, 6]), event("llama.cpp", [7]), until=Exchange.closed_by_client)
        engine.submit(asked(stop_token_ids=[9]))
        assert (await answers(engine, "a"))["a"] == [EngineDelta("a", [5, 9], "stop")]


FAULTS = [
    ([event("vllm", [VOCAB])], f"the token id {VOCAB}"),
    ([event("vllm", [-1])], "the token id -1"),
    ([event("vllm", [1] * 9)], "more than the 8 tokens"),
    ([event("vllm", [1] * 5000)], "5000 tokens in one event"),
    ([event("vllm", [5])], "ended before the answer did"),
    ([event("vllm", [5], "abort")], "ended the request with 'abort'"),
    ([event("vllm", [5], "stop"), event("vllm", [6])], "tokens after the end"),
    ([b"data: {\n\n"], "cannot be read"),
    ([b"data: " + b"x" * 400_000], "an event of more than"),
    ([b"data: 1\ndata: 2" + b"2" * 200_000 + b"\ndata:" + b"x" * 200_000 + b"\n\n"], "an event of more than"),
    ([{"error": {"message": "out of memory", "code": 500}}], "it says: out of memory"),
]


@pytest.mark.parametrize(("said", "words"), FAULTS, ids=[words for _, words in FAULTS])
async def test_what_a_server_must_not_say_ends_that_request(said: list[Any], words: str) -> None:
    async with serving() as (server, engine):
        server.script = sends(*said)
        delta = await failed(engine, asked())
        assert words in delta.error
        assert server.url in delta.error
        assert delta.code == ("unavailable" if "abort" in words else "internal_error")
        server.script = sends(event("vllm", [5], "stop"))
        engine.submit(asked("b"))
        assert tokens_of((await answers(engine, "b"))["b"]) == [5]


REFUSALS = [(400, "invalid_request"), (422, "invalid_request"), (429, "unavailable"), (500, "internal_error")]


@pytest.mark.parametrize(("status", "code"), REFUSALS)
async def test_a_refused_request_is_told_in_one_sentence(status: int, code: str) -> None:
    async with serving() as (server, engine):
        server.script = lambda exchange: exchange.refuse(status, {"error": {"message": "too\nlong " + "x" * 9000}})
        delta = await failed(engine, asked())
        assert delta.code == code
        assert f"it answers {status}: too long xx" in delta.error
        assert len(delta.error) < 500
        server.script = sends({"error": {"message": "no such token", "code": 400}})
        assert (await failed(engine, asked("b"))).code == "invalid_request"


async def test_a_server_that_dies_loses_all_and_fails_none() -> None:
    async with serving() as (server, engine):
        server.script = sends(event("vllm", [5]), until=Exchange.closed_by_client)
        for name in "ab":
            engine.submit(asked(name))
        got: set[str] = set()
        while got != {"a", "b"}:
            got |= {delta.id for delta in (await engine.next()).deltas}
        server.kill()
        for _ in range(2):
            with pytest.raises(RingLost, match="does not answer any more"):
                await engine.next()


async def test_a_connection_that_breaks_alone_fails_its_request_alone_unless_it_is_asked_anew() -> None:
    async with serving() as (server, engine):

        async def script(exchange: Exchange) -> None:  # as one that was kept open may be closed as it is used
            server.script = sends(event("vllm", [5]), until=Exchange.drop)
            exchange.writer.close()

        server.script = script
        delta = await failed(engine, asked())
        assert delta.code == "unavailable"
        assert server.asked.count("/v1/completions") == 4 + 2  # four of them at the start
        assert "the connection broke" in delta.error


OTHER = {"data": [{"id": "smol", "root": "/other", "max_model_len": 64}]}
CHANGES: list[tuple[str, str, Any, str]] = [
    ("vllm", "/version", {"version": "0.33.0"}, "was vLLM 0.32.0 with /smol .* and is vLLM 0.33.0"),
    ("vllm", "/v1/models", OTHER, "is vLLM 0.32.0 with /other"),
    ("sglang", "/v1/models", {"data": [{"max_model_len": 63}]}, "64 tokens of context.* and is .*63 tokens"),
    ("llama.cpp", "/v1/models", {"data": [{"meta": {"n_vocab": 99}}]}, "and is .*a vocabulary of 99"),
    ("llama.cpp", "/props", (404, {}), "is not what it was"),
    ("vllm", "/health", (503, {"error": "engine is dead"}), "/health answers 503 .engine is dead"),
]


@pytest.mark.parametrize(("kind", "path", "said", "words"), CHANGES, ids=[f"{one[0]} {one[3]}" for one in CHANGES])
async def test_a_server_that_has_changed_is_lost(kind: str, path: str, said: Any, words: str) -> None:
    async with serving(kind, health=0.0, identity=0.0) as (server, engine):
        server.told[path] = said
        with pytest.raises(RingLost, match=words):
            await answers(engine, "none")


FORMS = [("vllm", "/metrics", "vllm:generation_tokens_total{} %d\n"), ("llama.cpp", "/slots", '[{"n": %d}]')]


@pytest.mark.parametrize(("kind", "path", "form"), [*FORMS, ("sglang", "", "")])
async def test_steps_are_progress_and_not_health(kind: str, path: str, form: str) -> None:
    async with serving(kind, health=0.0) as (server, engine):
        enough = asyncio.Event()
        server.on_asked = lambda _: enough.set() if server.asked.count("/health") > 5 else None
        if path:
            await enough.wait()
            assert engine._steps == 0
        count = iter(range(1_000_000))
        server.told[path] = lambda: form % next(count)
        server.asked.clear()
        enough.clear()
        await enough.wait()
        assert engine._steps == 0, "SGLang computes a token for each look at its health while it has nothing to do"
        server.script = sends(until=Exchange.closed_by_client)
        engine.submit(asked())
        assert (await engine.next()).steps < (await engine.next()).steps


async def test_what_computes_is_there() -> None:
    """SGLang answers /health between two parts of a prompt, one of which may take longer than a look waits."""
    async with serving("sglang") as (_, engine):
        assert engine._watch is not None
        engine._watch._answered = 0.0
        await engine._watch._see_progress()
        assert engine._watch._answered == 0.0, "the first mark tells nothing"
        await engine._watch._see_progress()
        assert engine._watch._answered > 0.0


async def test_a_server_waits_for_whoever_takes_its_tokens() -> None:
    async with serving() as (server, engine):
        count = 5 * generations.EVENTS_GATHERED
        sent = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            await exchange.send(*[event("vllm", [5])] * count, event("vllm", [], "length"))
            sent.set()
            await exchange.end()

        server.script = script
        engine.submit(asked(max_tokens=count))
        await sent.wait()
        told = (await answers(engine, "a"))["a"]
        assert len(tokens_of(told)) == count
        assert max(len(delta.tokens) for delta in told) <= generations.EVENTS_GATHERED


STARTS: list[tuple[str, str, str, Any, int, type[RyzansteinError], str]] = [
    *(
        (kind, at, "", 0, VOCAB, ConfigurationError, "set the engine's kind")
        for kind in KINDS
        for at in KINDS
        if kind != at
    ),
    *((kind, kind, "", 0, VOCAB + by, ModelLoadError, "the model's dir") for kind in KINDS for by in (-2000, 2000)),
    *((kind, kind, "token", {"choices": [{"text": "x"}]}, VOCAB, ConfigurationError, "no token ids") for kind in KINDS),
    ("vllm", "vllm", "/version", (403, {}), VOCAB, ConfigurationError, "asks for credentials .403"),
    (
        "vllm",
        "vllm",
        "/version",
        (503, {"error": {"message": "Loading"}}),
        VOCAB,
        Unavailable,
        "not ready .503: Loading",
    ),
    ("sglang", "sglang", "/health", (503, ""), VOCAB, Unavailable, "not ready .503: nothing"),
    ("vllm", "vllm", "/version", "x" * (5 << 20), VOCAB, ConfigurationError, "more than 4194304 bytes"),
    ("vllm", "vllm", "/v1/models", {"data": []}, VOCAB, ConfigurationError, "serves no model"),
]


@pytest.mark.parametrize(("kind", "at", "path", "said", "vocab", "error", "words"), STARTS, ids=range(len(STARTS)))
async def test_a_server_that_cannot_be_used_is_refused(
    kind: str, at: str, path: str, said: Any, vocab: int, error: type[RyzansteinError], words: str
) -> None:
    async with ScriptedServer(at) as server:
        server.told[path] = said
        engine = make_server_engine(kind, server.url, None, vocab, 32, 4)
        with pytest.raises(error, match=words) as raised:
            await engine.start()
        assert server.url in str(raised.value)
        await engine.stop()


async def test_nobody_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.executor.engines.server.engine.REACH_SECONDS", 0.5)
    async with ScriptedServer("vllm") as server:
        pass
    engine = make_server_engine("vllm", server.url, None, VOCAB, 32, 4)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await engine.start()
    await engine.stop()


async def test_credentials_are_sent_and_never_told(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sesame\n")
    async with ScriptedServer("vllm") as server:
        server.wanted_token = "Bearer sesame"
        engine = make_server_engine("vllm", server.url, secret, VOCAB, 32, 4)
        await engine.start()
        server.script = lambda exchange: exchange.refuse(400, "your key sesame may not")
        engine.submit(asked())
        assert (await engine.next()).deltas[-1].error.endswith("your key *** may not")
        server.script = lambda exchange: exchange.refuse(401, {})
        engine.submit(asked("b"))
        with pytest.raises(RingLost, match=r"refuses the credentials .401"):
            await engine.next()
        await engine.stop()
        secret.write_text("wrong")
        engine = make_server_engine("vllm", server.url, secret, VOCAB, 32, 4)
        with pytest.raises(ConfigurationError, match=r"refuses the credentials .401.: put"):
            await engine.start()
        await engine.stop()


WRONG = [("ollama", "http://h:1", "key"), ("vllm", "http://me:sesame@h:1", "key"), ("vllm", "h:1", "key")]
WRONG += [
    ("vllm", "http://h:port", "key"),
    *(("vllm", "http://h:1", key) for key in ("", "two\nlines", "schlüssel", "-")),
]


@pytest.mark.parametrize(("kind", "url", "content"), WRONG)
def test_wrong_settings_are_refused(kind: str, url: str, content: str, tmp_path: Path) -> None:
    if content != "-":  # then there is no such file
        (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigurationError) as raised:
        make_server_engine(kind, url, tmp_path / "key", VOCAB, 32, 4)
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_body_names_all_that_is_asked_for(kind: str) -> None:
    dialect = DIALECTS[kind](ServerClient("http://h:1", None, 1))
    # Two tokens of the answer are there already, so that four more are the sixth.
    body = dialect.body(EngineRequest("a", [1, 2, 3, 4], 2, 9, SAMPLED, [7], cache_salt="salt"))
    sampling = body.get("sampling_params", body)
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"], sampling["min_p"]) == (0.5, 4, 0.9, 0.1)
    assert [1, 2, 3, 4] in body.values()
    assert 9 in sampling.values()
    assert sampling["logit_bias"] == ([[5, 2.0]] if kind == "llama.cpp" else {"5": 2.0})
    assert sampling.get("min_tokens", sampling.get("min_new_tokens")) == (None if kind == "llama.cpp" else 4)
    assert "salt" not in json.dumps(body) or kind == "vllm"
    assert sampling["ignore_eos"] is (kind == "vllm")
    assert sampling.get("seed", 0) < 1 << 63
    neutral = dialect.body(asked())
    params = neutral.get("sampling_params", neutral)
    assert (params["temperature"], params["top_p"], params["min_p"]) == (1.0, 1.0, 0.0)
    assert params["top_k"] in (0, -1)
    assert params["ignore_eos"] is True
    if kind == "sglang":
        past_the_end = dialect.body(asked(stop_token_ids=[7], runs_on=True))["sampling_params"]
        assert (past_the_end["ignore_eos"], past_the_end["stop_token_ids"]) == (True, [7])


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_our_processor_is_told_all_and_vllm_is_greedy(path: str) -> None:
    dialect = VllmDialect(ServerClient("http://h:1", None, 1))
    dialect.path, dialect._processor = path, True
    body = dialect.body(EngineRequest("a", [1, 2, 3], 2, 9, SAMPLED, [7], Grammar("regex", "a+")))
    sampling = body.get("sampling_params", body)
    assert (sampling["temperature"], sampling["min_tokens"], sampling["logprobs"]) == (0.0, 0, 2)
    assert sampling["stop_token_ids"] == [7]
    assert "logit_bias" not in sampling
    extra = body["vllm_xargs"]["ryzanstein"] if path == "/v1/completions" else sampling["extra_args"]["ryzanstein"]
    wanted = SAMPLED_TOLD | {"prompt_tokens": 2, "stop_token_ids": [7], "grammar": {"kind": "regex", "text": "a+"}}
    assert (json.loads(extra) if isinstance(extra, str) else extra) == wanted


@pytest.mark.parametrize("turns", range(6))
def test_a_scripted_server_leaves_no_connection_behind_that_it_was_accepting(turns: int) -> None:
    async def connect_and_leave() -> None:
        async with ScriptedServer("vllm") as server:
            port = int(server.url.rpartition(":")[2])
            coming = asyncio.create_task(asyncio.open_connection("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
        with contextlib.suppress(OSError):
            (await coming)[1].close()

    asyncio.run(connect_and_leave())
    gc.collect()  # what was left behind would fail another test

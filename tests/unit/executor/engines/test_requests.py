"""What a group whose engine schedules for itself has taken on: endings, refusals, suspects, deadlines, its load."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.executor.engines.base import EngineDelta, EngineFacts, EngineRequest, EngineStep
from services.executor.engines.requests import EngineRequests, spec_of
from services.executor.structured_output import GrammarCompiler
from shared.engine_features import FEATURES, OF_RINGS, asks_for
from shared.errors import RingLost, StorageFull
from shared.messages import (
    GenerationRequest,
    Grammar,
    Refusal,
    SamplingParams,
    SparseAttention,
    TokenEntry,
    TokenLogprobs,
)
from tests.unit.executor.structured_output.guided_ring import byte_compiler

VOCABULARY = 24
CONTEXT = 30
END = 1  # the model's own end of a text
STOPS = [3, 7, 11]
REGEX = Grammar("regex", "a*")
FACTS = EngineFacts("an engine 1", VOCABULARY, CONTEXT, places=2, kv_tokens=64)


def text(seed: int, start: int, stop: int) -> list[int]:
    return [(seed * 31 + at * 5 + at // 4) % VOCABULARY for at in range(start, stop)]


def ask(name: str = "a", prompt: int = 3, max_tokens: int = 8, seed: int = 0, **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", SamplingParams(seed=seed))
    return GenerationRequest(name, "r", "m", "me", [2] * prompt, max_tokens, sampling, **fields)


def whole(request: GenerationRequest) -> tuple[list[int], str]:
    """The answer that nobody disturbs, and how it ends."""
    found: list[int] = []
    while len(found) < request.max_tokens and len(request.prompt) + len(found) < CONTEXT:
        found += text(request.sampling.seed, len(found), len(found) + 1)
        if found[-1] in request.stop_token_ids:
            return found, "stop"
    return found, "length"


def made(**facts: Any) -> EngineRequests:
    told = msgspec.structs.replace(FACTS, **facts)
    return EngineRequests(told, spec_of(told, 4), max_waiting=100, end_tokens=[END])


def grammar_state(*, complete: bool) -> Any:
    """Of a grammar that any text matches."""
    return SimpleNamespace(complete=complete, advance=lambda *tokens: None, may_end=lambda: True)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = byte_compiler()
    yield made
    made.close()


def begun(*asked: GenerationRequest, **facts: Any) -> tuple[EngineRequests, list[EngineRequest]]:
    """Added, and handed to an engine as far as it has places."""
    found = made(**facts)
    for request in asked:
        assert found.add(request) is None
    return found, found.take_submissions(1.0)


def told(requests: EngineRequests, *deltas: EngineDelta, **step: Any) -> list[TokenEntry]:
    return requests.update(EngineStep(1, list(deltas), **step), 2.0).get("me", [])


def test_an_answer_is_cut_behind_its_stop_token() -> None:
    requests, (one,) = begun(ask(stop_token_ids=[7]))
    assert (one.stop_token_ids, one.runs_on) == ([7], True)
    (entry,) = told(requests, EngineDelta(one.id, [5, 7, 8]))
    assert (entry.tokens, entry.finish) == ([5, 7], "stop")
    assert requests.take_aborts() == [one.id], "the engine does not know"
    assert told(requests, EngineDelta(one.id, [9], "stop")) == []
    assert not requests.has_work


@pytest.mark.parametrize(("finish", "aborts"), [("", ["a/0/1"]), ("length", [])])
def test_an_answer_is_cut_at_max_tokens(finish: Any, aborts: list[str]) -> None:
    requests, (one,) = begun(ask(max_tokens=2))
    (entry,) = told(requests, EngineDelta(one.id, [5, 6, 8], finish))
    assert (entry.tokens, entry.finish, requests.take_aborts()) == ([5, 6], "length", aborts)


@pytest.mark.parametrize(("last", "tokens"), [(END, [5]), (6, [5, 6])])
def test_the_token_that_ends_a_grammars_text_is_no_part_of_it(last: int, tokens: list[int]) -> None:
    request = ask(grammar=REGEX, stop_token_ids=[9])
    requests, nothing = begun(request)
    assert nothing == [], "its grammar is being compiled"
    requests.release(request, grammar_state(complete=False))
    (one,) = requests.take_submissions(1.0)
    assert (one.stop_token_ids, one.runs_on) == ([END, 9], False)
    (entry,) = told(requests, EngineDelta(one.id, [5, last], "stop"))
    assert (entry.tokens, entry.finish) == (tokens, "stop")


BREAKS_OFF = "an engine 1 ended the answer in the middle of its format; its log may say why."
# The last delta, whether the request names the model's end among its stop tokens, and whether the answer is whole.
ENDINGS = {
    "whole": (b"ab\x01", True, True),
    "in its middle": (b"a\x01", True, False),
    "whole, the end left out": (b"ab", True, True),
    "in its middle, the end left out": (b"a", True, False),
    "at a stop token of the request's": (b"a\t", False, True),
    "with what cannot be followed": (b"ax\x01", True, True),
}


@pytest.mark.parametrize(("last", "by_the_model", "matches"), ENDINGS.values(), ids=ENDINGS)
def test_an_answer_that_ends_in_the_middle_of_its_grammar_has_failed(
    compiler: GrammarCompiler, last: bytes, by_the_model: bool, matches: bool
) -> None:
    request = ask(grammar=Grammar("regex", "a{2,9}b"), stop_token_ids=[END] if by_the_model else [END, 9])
    requests, _ = begun(request, vocab_size=256)
    requests.release(request, compiler.start(request))
    (one,) = requests.take_submissions(1.0)
    assert [entry.finish for entry in told(requests, EngineDelta(one.id, [*b"a"]))] == [""]
    (entry,) = told(requests, EngineDelta(one.id, [*last], "stop"))
    assert (entry.finish, entry.error_code, entry.error) == (
        ("stop", "", "") if matches else ("error", "invalid_grammar", BREAKS_OFF)
    )
    assert not requests.has_work


def test_an_engines_error_ends_the_request_that_it_names() -> None:
    requests, (a, b) = begun(ask("a"), ask("b"))
    refused, other = told(
        requests, EngineDelta(a.id, [5], "error", error="Not so.", code="invalid_request"), EngineDelta(b.id, [6])
    )
    assert (refused.tokens, refused.error_code, refused.error, refused.retryable) == (
        [5],
        "invalid_request",
        "Not so.",
        False,
    )
    assert (other.tokens, other.finish) == ([6], "")


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_that_the_model_does_not_have_ends_its_request_alone(token: int) -> None:
    requests, (a, b) = begun(ask("a"), ask("b"))
    bad, good = told(requests, EngineDelta(a.id, [5, token]), EngineDelta(b.id, [6]))
    assert (bad.tokens, bad.finish, bad.error_code, good.tokens) == ([], "error", "internal_error", [6])
    assert f"an engine 1 answered with the token {token}" in bad.error
    assert requests.take_aborts() == [a.id]


def test_log_probabilities_come_with_their_tokens_and_are_missed() -> None:
    requests, (a, b) = begun(*(ask(name, max_tokens=1, sampling=SamplingParams(logprobs=1)) for name in "ab"))
    logprobs = [TokenLogprobs(-0.5, [(5, -0.5)]), TokenLogprobs(-1.0, [])]
    good, bad = told(requests, EngineDelta(a.id, [5, 6], logprobs=logprobs), EngineDelta(b.id, [5]))
    assert (good.tokens, good.logprobs) == ([5], logprobs[:1])
    assert bad.error == "an engine 1 answered with 0 log probabilities for 1 tokens."


def test_what_was_found_in_the_cache_is_told_once() -> None:
    requests, (one,) = begun(ask(prompt=10))
    entries = [entry for _ in range(2) for entry in told(requests, EngineDelta(one.id, [5], cached_tokens=8))]
    assert ([entry.cached_tokens for entry in entries], requests.cached_tokens) == ([8, 0], 8)
    assert (requests.take_prompt_tokens(), requests.take_prompt_tokens()) == (2, 0)


def test_a_prompts_log_probabilities_need_no_output() -> None:
    requests, (one,) = begun(ask(max_tokens=0, prompt_logprobs=0))
    assert (one.max_tokens, one.prompt_logprobs) == (0, 0)
    (entry,) = told(requests, EngineDelta(one.id, [5], "length", prompt_scores=b"scores"))
    assert (entry.tokens, entry.finish, entry.prompt_scores, requests.has_work) == ([], "length", b"scores", False)


def test_a_prompts_log_probabilities_are_not_asked_for_again() -> None:
    requests, (one,) = begun(ask(lane="batch", prompt_logprobs=0), places=1)
    (entry,) = told(requests, EngineDelta(one.id, [5], prompt_scores=b"scores"))
    assert entry.prompt_scores == b"scores"
    requests.add(ask("b", max_tokens=1))
    (urgent,) = requests.take_submissions(1.0)
    assert (urgent.tokens, requests.take_aborts(), requests.preemptions) == ([2, 2, 2], [one.id], 1)
    told(requests, EngineDelta(urgent.id, [5], "length"))
    (again,) = requests.take_submissions(1.0)
    assert (again.id, again.tokens, again.prompt_logprobs) == ("a/0/2", [2, 2, 2, 5], -1)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_suspect_is_computed_alone(first: str) -> None:
    requests, (one,) = begun(
        ask("a", suspected="crashed" * (first == "a")), ask("b", suspected="crashed" * (first == "b"))
    )
    assert (one.id, requests.take_submissions(1.0)) == ("a/0/1", [])
    told(requests, EngineDelta(one.id, text(0, 0, 8), "length"))
    assert [one.id for one in requests.take_submissions(1.0)] == ["b/0/1"]


def test_a_deadline_ends_what_still_waits() -> None:
    requests, _ = begun(ask("a", deadline=5.0), ask("b", deadline=5.0), ask("c", deadline=7.0), places=1)
    assert not requests.expire(4.0)
    assert requests.expire(5.0)
    (entry,) = requests.take_entries()["me"]
    assert (entry.generation_id, entry.error_code, entry.retryable) == ("b", "deadline_exceeded", False)
    assert [*requests._live] == ["a", "c"]


def test_the_load_is_what_the_engine_has_and_what_it_is_yet_to_get() -> None:
    requests, (a, *_) = begun(ask("a", prompt=4), ask("b", prompt=5), ask("c", prompt=6))
    told(requests, EngineDelta(a.id, [5]), kv_used=0.25)
    load = requests.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (2, 1, 11)
    assert (load.free_blocks, load.total_blocks) == (12, 16)


def test_an_engine_that_has_nothing_holds_nothing() -> None:
    """It tells of no step in which it only drops what was aborted."""
    requests, (a,) = begun(ask("a"))
    told(requests, EngineDelta(a.id, [5]), kv_used=0.25)
    requests.cancel(["a"])
    assert requests.load().free_blocks == 16
    told(requests, EngineDelta(a.id, [6]), kv_used=0.25)
    assert requests.load().free_blocks == 16, "the step had begun before"


def test_a_full_queue_refuses_and_batch_requests_do_not_fill_it() -> None:
    requests = EngineRequests(FACTS, spec_of(FACTS, 4), max_waiting=1)
    assert requests.add(ask("a", lane="batch")) is None
    assert requests.add(ask("b")) is None
    codes = [found.code for name in "cd" if isinstance(found := requests.add(ask(name)), Refusal)]
    assert codes == ["queue_full"] * 2


ASKED = {
    "pooling": ask(embed=True, max_tokens=1),
    "second_segment": ask(classify=True, second_segment=1, max_tokens=1),
    "logprob_token_ids": ask(logprob_token_ids=[3], max_tokens=1),
    "adapter": ask(adapter="0" * 64),
    "sparse": ask(sparse=SparseAttention()),
    "grammar": ask(grammar=REGEX),
    "penalties": ask(sampling=SamplingParams(presence_penalty=0.5)),
    "logit_bias": ask(sampling=SamplingParams(logit_bias={3: 1.0})),
    "bad_words": ask(sampling=SamplingParams(bad_words=[[3]])),
    "allowed_token_ids": ask(sampling=SamplingParams(allowed_token_ids=[3])),
    "min_tokens": ask(sampling=SamplingParams(min_tokens=1)),
    "logprobs": ask(sampling=SamplingParams(logprobs=0)),
    "prompt_logprobs": ask(prompt_logprobs=0),
    "cache_salt": ask(cache_salt="s"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_an_engine_cannot_do_is_refused_by_name(name: str) -> None:
    assert asks_for(ASKED[name])[-1] == name
    refusal = made(unsupported=[name]).add(ASKED[name])
    assert (refusal.code, refusal.retryable) == ("invalid_request", False)
    assert refusal.message.startswith("an engine 1, which computes this model, does not support ")
    if name not in ("pooling", "second_segment", *OF_RINGS):
        assert made(adapters=1, unsupported=[one for one in FEATURES if one != name]).add(ASKED[name]) is None


@pytest.mark.parametrize("field", [{"embed": True}, {"logprob_token_ids": [3]}, {"adapter": "0" * 64}])
def test_what_no_such_engine_does_is_refused(field: dict[str, Any]) -> None:
    refusal = made().add(ask(max_tokens=1, **field))
    assert not refusal.retryable


def test_a_lost_engines_requests_all_end_so_that_others_go_on() -> None:
    requests, (a, _) = begun(ask("a"), ask("b"), ask("c"))
    told(requests, EngineDelta(a.id, [5]))
    entries = requests.fail_all(RingLost("It has ended."))["me"]
    assert [(one.generation_id, one.position, one.retryable) for one in entries] == [
        ("a", 1, True),
        ("b", 0, True),
        ("c", 0, True),
    ]
    assert not requests.has_work


ADAPTER, OTHER, THIRD = ("a" * 64, "b" * 64, "c" * 64)


def test_a_request_waits_for_the_files_of_its_adapter() -> None:
    requests, (b,) = begun(ask("a", adapter=ADAPTER), ask("b"), adapters=1)
    assert (b.adapter, b.adapter_directory) == ("", "")
    assert ADAPTER in requests.adapters_in_use
    requests.adapter_ready(OTHER, "/other")
    assert requests.take_submissions(2.0) == []
    requests.adapter_ready(ADAPTER, "/there")
    (a,) = requests.take_submissions(2.0)
    assert (a.adapter, a.adapter_directory) == (ADAPTER, "/there")
    told(requests, EngineDelta(a.id, [5], "length"))
    assert ADAPTER not in requests.adapters_in_use
    requests.adapter_gone(ADAPTER)
    assert requests.add(ask("c", adapter=ADAPTER)) is None
    assert requests.take_submissions(3.0) == []


def test_a_grammar_and_an_adapter_are_both_waited_for() -> None:
    request = ask("a", adapter=ADAPTER, grammar=REGEX)
    requests, handed = begun(request, adapters=1)
    requests.adapter_ready(ADAPTER, "/there")
    assert handed == requests.take_submissions(2.0) == []
    requests.release(request, grammar_state(complete=False))
    assert [one.adapter for one in requests.take_submissions(2.0)] == [ADAPTER]


def test_an_adapter_that_cannot_be_had_ends_the_requests_that_need_it() -> None:
    requests, (b,) = begun(ask("a", adapter=ADAPTER), ask("b"), adapters=1)
    requests.adapter_failed(ADAPTER, StorageFull("No room."))
    (entry,) = requests.take_entries()["me"]
    assert (entry.generation_id, entry.finish, entry.error) == ("a", "error", "No room.")
    assert told(requests, EngineDelta(b.id, [5]))


def test_the_adapters_in_memory_are_those_that_requests_had_last() -> None:
    requests = made(adapters=2, places=9)
    for number, digest in enumerate((ADAPTER, OTHER, ADAPTER, THIRD)):
        requests.adapter_ready(digest, f"/{digest}")
        assert requests.add(ask(str(number), adapter=digest)) is None
        assert len(requests.take_submissions(1.0)) == 1
    assert requests.adapters == [ADAPTER, THIRD]


def pooling_requests(**facts: Any) -> EngineRequests:
    told = msgspec.structs.replace(FACTS, **facts)
    vectors = {"pooling": "last", "embedding_size": told.embedding_size, "labels": told.labels, "normalized": False}
    return EngineRequests(told, msgspec.structs.replace(spec_of(told, 4), **vectors), max_waiting=100)


@pytest.mark.parametrize(
    ("facts", "fields"),
    [
        ({"tasks": ("embed",), "embedding_size": 2}, {"embed": True}),
        ({"tasks": ("classify",), "labels": ["good", "bad"]}, {"classify": True, "second_segment": 1}),
    ],
)
def test_a_vector_is_what_a_prompt_is_wanted_for(facts: dict[str, Any], fields: dict[str, Any]) -> None:
    requests = pooling_requests(**facts)
    asked = ask("a", max_tokens=1, **{"second_segment": 0} | fields)
    assert requests.add(asked) is None
    (a,) = requests.take_submissions(1.0)
    assert (a.pool, a.normalized, a.second_segment) == (facts["tasks"][0], False, asked.second_segment)
    (entry,) = told(requests, EngineDelta(a.id, finish="stop", vector=b"12345678", cached_tokens=2))
    assert (entry.tokens, entry.finish, entry.vector, entry.cached_tokens) == ([], "stop", b"12345678", 2)
    assert not requests.has_work
    refusal = requests.add(ask("b"))
    assert "generates no text" in refusal.message


def test_a_vector_of_another_length_is_an_error() -> None:
    requests = pooling_requests(tasks=("embed",), embedding_size=3)
    assert requests.add(ask("a", max_tokens=1, embed=True)) is None
    (a,) = requests.take_submissions(1.0)
    (entry,) = told(requests, EngineDelta(a.id, finish="stop", vector=b"12345678"))
    assert entry.error == "an engine 1 answered with 2 numbers, where the model gives 3."

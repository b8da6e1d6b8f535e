"""Drafts in texts that are held to a grammar: masks behind them, what fits, what is forced, and the same text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.executor.core.engine import SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.drafts import drafting
from services.executor.structured_output import (
    FORCED_BYTES,
    DraftMatcher,
    GrammarCompiler,
    GrammarState,
    GrammarWork,
    Vocabulary,
)
from services.executor.worker.stub import STUB_EOS_TOKEN, StubEngine, StubSettings
from shared.errors import InternalError, InvalidGrammar
from shared.messages import Grammar, SamplingParams
from tests.unit.executor.structured_output.guided_ring import CARD, GuidedRing, ask, state_of

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
RECORDS = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "minItems": 3,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {"name": {"enum": ["low", "middle"]}, "count": {"type": "integer", "maximum": 99}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
        }
    ),
)
GRAMMARS = {
    "records": RECORDS,
    "any object": Grammar("json_schema", '{"type":"object"}'),
    "constant": Grammar("json_schema", '{"const":"a constant, a constant, and é"}'),
    "digits": Grammar("regex", "([0-9]{2,3},){3}(end)?"),
    "repeated": Grammar("regex", "(abcabc)+"),
    "query": Grammar("lark", 'start: "SELECT " NAME ("," NAME)* " FROM " NAME\nNAME: /[a-z]{1,6}/'),
    "balanced": Grammar("lark", 'start: "(" start ")" | "x"'),
}


@pytest.fixture(scope="module")
def work() -> Iterator[GrammarWork]:
    made = GrammarWork()
    made.load(CARD, b"")
    yield made
    made.close()


def text_of(compiler: GrammarCompiler, grammar: Grammar, seed: int, most: int = 60) -> list[int]:
    """What the stub says, token by token."""
    ring = GuidedRing(compiler)
    ring.add(ask(grammar, seed=seed, max_tokens=most))
    ring.run()
    return ring.tokens()


def leaves_open(compiler: GrammarCompiler, grammar: Grammar, text: list[int], draft: int) -> bool:
    """Whether `draft` may follow `text`, and something it."""
    state = state_of(compiler, grammar, *text)
    if state.complete or not state.allowed()[draft]:
        return False
    state.advance(draft)
    return not state.complete


@pytest.mark.slow
@quick
@given(data=st.data(), name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 20))
def test_masks_behind_drafts_are_those_of_the_text_that_has_them(
    compiler: GrammarCompiler, work: GrammarWork, data: st.DataObject, name: str, seed: int
) -> None:
    """A text goes on in steps, each with drafts that are right up to somewhere."""
    grammar = GRAMMARS[name]
    text, at = text_of(compiler, grammar, seed), 0
    state = state_of(compiler, grammar)
    request = ask(grammar)
    while at < len(text):
        drafts = text[at : at + data.draw(st.integers(0, 6), "right")]
        drafts += data.draw(st.lists(st.sampled_from([*b'ab,0"}', STUB_EOS_TOKEN]), max_size=3), "whatever")
        fitting = state.fitting(drafts)
        for count in range(len(drafts)):
            if not leaves_open(compiler, grammar, text[:at] + drafts[:count], drafts[count]):
                assert fitting == count
                break
        else:
            assert fitting == len(drafts)
        sampling = SamplingState(request.sampling, request.prompt, text[:at])
        sampling.grammar = state
        samples = [sampling, *sampling.after_each(drafts[:fitting])]
        if data.draw(st.booleans(), "begun"):
            work.begin_masks(samples)
        for count, sample in enumerate(samples):
            assert sample.position == at + count
            assert sample.grammar is not None
            expected = state_of(compiler, grammar, *text[:at], *drafts[:count]).allowed()
            assert np.array_equal(sample.grammar.allowed(), expected)
        step = data.draw(st.integers(1, fitting + 1), "put out")
        state.advance(*text[at : at + step])
        at += step
    assert state.complete == state_of(compiler, grammar, *text).complete


def test_a_mask_behind_drafts_that_were_not_put_out_says_nothing_of_another_text(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, GRAMMARS["query"], *b"SELECT a")
    assert [behind.allowed()[ord(",")] for behind in state.after_each(list(b",b"))] == [False, True]
    state.advance(*b" FROM ")
    [behind] = state.after_each(list(b"c"))
    assert not behind.allowed()[ord(",")]


@quick
@given(name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 20))
def test_forced_tokens_are_the_only_ones_where_a_token_is_a_byte(
    compiler: GrammarCompiler, name: str, seed: int
) -> None:
    grammar, told = GRAMMARS[name], 0
    state = state_of(compiler, grammar)
    for token in text_of(compiler, grammar, seed):
        forced = state.forced()
        told += len(forced)
        if forced:
            assert np.flatnonzero(state.allowed()).tolist() == [forced[0]] == [token]
        state.advance(token)
    if name in ("records", "constant", "query"):
        assert told


def test_of_a_long_constant_only_the_beginning_is_looked_at(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, Grammar("json_schema", json.dumps({"const": "abcdefgh" * 2000})))
    assert state.forced() == list(('"' + "abcdefgh" * 2000).encode()[:FORCED_BYTES])
    state.advance(*state.forced())
    assert len(state.forced()) == FORCED_BYTES


def test_what_is_behind_a_draft_is_not_advanced(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, RECORDS)
    [behind] = state.after_each(list(b"["))
    assert (behind.forced(), behind.fitting([1]), behind.after_each([1])) == ([], 0, [])
    with pytest.raises(InternalError):
        behind.advance(1)


# --- the same text -------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.0, 0.7])
@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_the_text_is_the_same_with_drafts(
    compiler: GrammarCompiler, work: GrammarWork, name: str, right: float
) -> None:
    """Guesses from the text, what is forced, and a draft model's proposals; beside a text without a grammar, and one
    that goes on with what an earlier attempt has put out."""
    requests = [ask(GRAMMARS[name], str(seed), seed=seed, max_tokens=120) for seed in range(5)]
    requests.append(ask(None, "free", seed=3, max_tokens=12))
    plain = GuidedRing(compiler)
    plain.add(*requests)
    plain.run()
    begun = plain.tokens("0")[:3]
    requests[0] = ask(GRAMMARS[name], "0", seed=0, max_tokens=120, generated=begun, attempt=1)
    fast = GuidedRing(compiler, StubSettings(num_blocks=640, draft_right=right, draft_ms=0.001), drafts=7, work=work)
    fast.add(*requests)
    fast.run()
    for request in requests:
        known = request.generation_id
        assert list(request.generated) + fast.tokens(known) == plain.tokens(known)
        assert fast.last(known).finish == plain.last(known).finish
    if name in ("records", "constant", "repeated"):
        drafter = fast.batcher.drafter
        assert fast.steps < plain.steps
        assert drafter.accepted > 0


class SamplingEngine(StubEngine):
    """Samples for real, from logits that come again every fifth position."""

    def _drawn(self, samples: Sequence[SamplingState], seeds: Sequence[int]) -> list[SampledToken]:
        logits = [np.random.default_rng(state.position % 5).standard_normal(256) for state in samples]
        return Sampler().sample(torch.from_numpy(3 * np.stack(logits)).float(), samples)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=6, logprobs=0),
        SamplingParams(temperature=0.9, top_k=9, seed=7, frequency_penalty=0.2, logit_bias={ord("a"): 1.0}),
    ],
    ids=str,
)
def test_what_is_sampled_is_the_same_with_drafts(
    compiler: GrammarCompiler, work: GrammarWork, sampling: SamplingParams
) -> None:
    """Tokens, log probabilities and ends."""
    requests = [
        structs.replace(ask(grammar, name, max_tokens=150), sampling=sampling) for name, grammar in GRAMMARS.items()
    ]
    told, accepted = [], 0
    for drafts in (0, 7):
        ring = GuidedRing(
            compiler,
            StubSettings(num_blocks=640, draft_right=0.5 if drafts else 0.0),
            drafts=drafts,
            work=work,
            engine=SamplingEngine,
        )
        ring.add(*requests)
        ring.run()
        scores = {
            name: [one for entry in ring.log if entry.generation_id == name for one in entry.logprobs or []]
            for name in GRAMMARS
        }
        told.append([(name, ring.tokens(name), scores[name], ring.last(name).finish) for name in GRAMMARS])
        accepted = ring.batcher.drafter.accepted
    assert told[0] == told[1]
    assert all(finish in ("stop", "length") for *_, finish in told[0])
    assert any(scores for _, _, scores, _ in told[0]) == (sampling.logprobs >= 0)
    assert accepted > 20


def test_forced_tokens_save_steps(compiler: GrammarCompiler) -> None:
    """Where everything is forced, all drafts are right."""
    counts = []
    for drafts in (0, 15):
        ring = GuidedRing(compiler, drafts=drafts)
        ring.add(ask(Grammar("json_schema", json.dumps({"const": "0123456789" * 16}))))
        ring.run()
        assert len(ring.text()) == 162
        assert ring.last().finish == "stop"
        counts.append(ring.steps)
    assert ring.batcher.drafter.accepted == ring.batcher.drafter.drafted > 100
    assert counts[1] < counts[0] / 5


class NotingEngine(StubEngine):
    """Notes what it computes."""

    computed: set[int]

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self.computed = getattr(self, "computed", set()) | set(as_int32(plan.token_ids).tolist())
        return super().execute(plan, samples)


@pytest.mark.parametrize("right", [True, False])
def test_a_predicted_text_is_drafted_as_far_as_it_fits(compiler: GrammarCompiler, right: bool) -> None:
    said = text_of(compiler, RECORDS, 1, 400)
    predicted = said if right else [ord("x") if at % 9 == 8 else token for at, token in enumerate(said)]
    ring = GuidedRing(compiler, drafts=15, engine=NotingEngine)
    ring.add(structs.replace(ask(RECORDS), prediction=predicted))
    ring.run()
    assert ring.tokens() == said
    assert ring.batcher.drafter.accepted > len(said) / (2 if right else 4)
    assert isinstance(ring.engine, NotingEngine)
    assert ord("x") not in ring.engine.computed, "a row would have been computed that no text can have"


# --- failures ------------------------------------------------------------------------------------


class Lame:
    """A matcher of drafts that fails at a word of the library's."""

    def __init__(self, matcher: Any, failing: str) -> None:
        self._matcher, self._failing = matcher, failing

    def __getattr__(self, name: str) -> Any:
        if name == self._failing:
            raise RuntimeError("a fault of the library")
        return getattr(self._matcher, name)


@pytest.mark.parametrize(
    "failing", ["compute_ff_bytes", "validate_tokens", "consume_token", "unsafe_compute_mask_ptr", "rollback"]
)
def test_a_fault_behind_drafts_ends_drafts_and_not_the_text(
    compiler: GrammarCompiler, work: GrammarWork, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    made = DraftMatcher.__init__

    def lame(self: DraftMatcher, matcher: Any, vocabulary: Vocabulary) -> None:
        made(self, Lame(matcher, failing), vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftMatcher, "__init__", lame)
    ring = GuidedRing(compiler, drafts=7, work=work)
    ring.add(ask(RECORDS))
    ring.run()
    assert ring.tokens() == text_of(compiler, RECORDS, 1, 400)
    assert ring.last().finish == "stop"
    assert not ring.batcher.drafter.accepted


def test_a_grammar_that_fails_among_drafts_ends_its_own_text_alone(compiler: GrammarCompiler) -> None:
    ring = GuidedRing(compiler, drafts=7)
    ring.add(ask(RECORDS, "fine"), ask(RECORDS, "broken", seed=2))
    while ring.batcher.drafter.accepted < 5:
        assert ring.step()
    [broken] = [s for s in ring.batcher._planner.running if s.request.generation_id == "broken"]
    assert isinstance(broken.sampling.grammar, GrammarState)
    broken.sampling.grammar.advance(ord("x"))
    ring.run()
    assert ring.last("broken").error_code == InvalidGrammar("").code
    assert ring.tokens("fine") == text_of(compiler, RECORDS, 1, 400)


def test_sequences_share_the_room_for_masks(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MASK_BYTES", 6 * CARD.vocab_size)
    ring = GuidedRing(compiler, drafts=7)
    ring.add(*(ask(GRAMMARS["constant"], str(seed), seed=seed) for seed in range(3)))
    ring.run()
    assert ring.tokens("0") == text_of(compiler, GRAMMARS["constant"], 0)
    assert max(len(entry.tokens) for entry in ring.log) == 1 + 2

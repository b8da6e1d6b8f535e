"""Tokens that may not be drawn: ends that come too early, what is not allowed, bad words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.sampling_state import SamplingState, TokenBans, problem_with_bans, token_bans_of
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.drafts.proposers.ngrams import Estimates, PromptLookup
from services.executor.worker.stub import StubEngine, StubSettings
from shared.messages import SamplingParams

VOCAB = 12
WORDS = [[3], [1, 2], [1, 2, 4]]


def bans(params: SamplingParams, stops: list[int], output: list[int]) -> TokenBans:
    made = token_bans_of(params, stops, output)
    assert made is not None
    return made


def test_an_end_is_banned_until_there_are_enough_tokens() -> None:
    early = bans(SamplingParams(min_tokens=2), [7, 5, 7], [1])
    assert early.banned.tolist() == [5, 7]
    early.advance(1)
    assert early.banned.tolist() == []
    assert token_bans_of(SamplingParams(min_tokens=2), [], []) is None
    assert token_bans_of(SamplingParams(), [7], []) is None


def test_the_last_token_of_a_word_is_banned_behind_the_others() -> None:
    found = bans(SamplingParams(bad_words=WORDS), [], [1])
    assert found.banned.tolist() == [2, 3]
    assert found.ahead([0, 1, 2]).banned.tolist() == [3, 4]
    assert found.banned.tolist() == [2, 3]


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 12))
def test_a_continuation_bans_what_the_first_attempt_would_have(output: list[int], at: int) -> None:
    params = SamplingParams(bad_words=WORDS, min_tokens=6)
    whole = bans(params, [0], [])
    for token in output:
        whole.advance(token)
    later = bans(params, [0], output[:at]).ahead(output[at:])
    assert later.banned.tolist() == whole.banned.tolist() == bans(params, [0], output).banned.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_what_is_banned_is_not_drawn(temperature: float, top_k: int) -> None:
    logits = torch.arange(VOCAB).float()[None] * 3
    for fields, most_likely in (
        ({"min_tokens": 1}, 8),
        ({"bad_words": [[11], [10], [1, 9]]}, 9),
        ({"allowed_token_ids": [2, 6]}, 6),
        ({"allowed_token_ids": [2, 6], "bad_words": [[6]], "logit_bias": {6: 50.0}}, 2),
    ):
        drawn = set()
        for seed in range(30):
            params = SamplingParams(temperature, top_k, seed=seed, **fields)  # type: ignore[arg-type]
            state = SamplingState(params, [1], [], stops=[11, 10, 9])
            drawn.add(Sampler().sample(logits, [state])[0].token)
        assert most_likely in drawn
        allowed = fields.get("allowed_token_ids") or range(most_likely + 1)
        assert drawn <= set(allowed)  # type: ignore[arg-type]
        assert temperature or len(drawn) == 1


def test_the_stub_keeps_to_it() -> None:
    engine = StubEngine(StubSettings())
    letters = range(ord("a"), ord("z") + 1)
    for fields, expected in (
        ({"allowed_token_ids": [ord("q"), ord("r")]}, {ord("q"), ord("r")}),
        ({"allowed_token_ids": [7]}, {7}),
        ({"bad_words": [[letter] for letter in letters]}, {ord(" ")}),
    ):
        states = [SamplingState(SamplingParams(seed=seed, **fields), [1], []) for seed in range(50)]  # type: ignore[arg-type]
        assert {engine._sample(state, state.params.seed or 0, None).token for state in states} == expected


@pytest.mark.parametrize(
    ("params", "part"),
    [
        (SamplingParams(allowed_token_ids=[VOCAB]), "vocabulary"),
        (SamplingParams(bad_words=[[-1]]), "vocabulary"),
        (SamplingParams(bad_words=[[]]), "without tokens"),
        (SamplingParams(allowed_token_ids=[5], min_tokens=1), "nothing to draw"),
        (SamplingParams(bad_words=[[token] for token in range(VOCAB)]), "nothing to draw"),
        (SamplingParams(bad_words=WORDS, allowed_token_ids=[5, 6], min_tokens=9), None),
    ],
)
def test_what_leaves_nothing_is_a_problem(params: SamplingParams, part: str | None) -> None:
    problem = problem_with_bans(params, [5], VOCAB)
    assert problem is None if part is None else problem is not None and part in problem


def test_a_prediction_is_what_is_guessed() -> None:
    from array import array

    tokens = array("i", [9, 8, 7])
    lookup = PromptLookup(tokens, Estimates(), [1, 2, 3, 4, 5, 6])
    lookup.guess(3)
    assert lookup.guesses[:3] == [1, 2, 3]  # it follows the prompt
    tokens.extend([1, 2, 3])
    lookup.learn([1, 2, 3])
    lookup.guess(3)
    assert lookup.guesses[:3] == [4, 5, 6]
    tokens.extend([0, 0, 4, 5])  # the text left it, and came back to it
    lookup.learn([0])
    lookup.guess(1)
    assert lookup.guesses[:1] == [6]

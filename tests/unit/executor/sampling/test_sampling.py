"""The sampler against plain references, exact probabilities and itself in other batches."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.executor.core.engine import BadLogits
from services.executor.core.sampling_state import SamplingState
from services.executor.sampling import sampler
from services.executor.sampling.sampler import Sampler
from shared.errors import InternalError
from shared.messages import SamplingParams

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
VOCAB = 40
Floats = NDArray[np.float64]


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    """Coarse logits, so that ties happen as they do with bf16 weights."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 8).round() / 4


def state(prompt: list[int] | None = None, generated: list[int] | None = None, **params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params), prompt or [], generated or [])  # type: ignore[arg-type]


def reference_scores(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """Penalties and biases by their formulas, token by token."""
    scores = logits.copy()
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = scores[token]
        scores[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in counts.items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def reference_probs(scores: Floats, params: SamplingParams) -> Floats:
    """Temperature and filters, one after the other, ties at a threshold kept."""
    exps = np.exp((scores - scores.max()) / params.temperature)
    probs: Floats = exps / exps.sum()
    if params.top_k:
        probs[probs < sorted(probs, reverse=True)[min(params.top_k, len(probs)) - 1] * (1 - 1e-9)] = 0
    if params.top_p < 1:
        total, threshold = 0.0, 0.0
        for value in sorted(probs, reverse=True):
            total, threshold = total + value, value
            if total >= params.top_p * probs.sum():
                break
        probs[probs < threshold * (1 - 1e-9)] = 0
    if params.min_p:
        probs[probs < params.min_p * probs.max() * (1 - 1e-6)] = 0
    return probs / probs.sum()


def assert_drawn_from(tokens: list[int], probs: Floats) -> None:
    """Chi-square of `tokens` against `probs`, rare tokens pooled. Seeds are fixed, so is the outcome."""
    observed = np.bincount(tokens, minlength=len(probs))
    assert observed[probs == 0].sum() == 0, "a token that was filtered out was drawn"
    expected = probs * len(tokens)
    common = expected >= 10
    groups = [(observed[common], expected[common])]
    if expected[~common].sum() >= 10:
        groups.append((observed[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)))
    statistic = sum(((o - e) ** 2 / e).sum() for o, e in groups)
    freedom = max(sum(len(e) for _, e in groups) - 1, 1)
    # Wilson and Hilferty's approximation of the 99.9 % quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic <= limit


# --- the distribution ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.8, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {0: 3.0, 1: -100.0}, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_exact_probabilities(params: dict[str, object], device: str) -> None:
    logits, n = logits_of(3), 4000
    prompt, output = [1, 2, 3, 4], [3, 3, 5, 6]
    states = [state(prompt, output, seed=seed, **params) for seed in range(n)]
    tokens = [s.token for s in Sampler().sample(logits.expand(n, -1).to(device), states)]
    wanted = states[0].params
    scores = reference_scores(logits[0].double().numpy(), wanted, prompt, output)
    assert_drawn_from(tokens, reference_probs(scores, wanted))


def test_draws_of_one_seed_follow_the_distribution_over_positions() -> None:
    logits, n = logits_of(4), 4000
    states = [state(generated=[0] * position, seed=11) for position in range(n)]
    tokens = [s.token for s in Sampler().sample(logits.expand(n, -1), states)]
    assert_drawn_from(tokens, reference_probs(logits[0].double().numpy(), SamplingParams()))


def test_a_wide_vocabulary_with_a_nucleus_wider_than_the_first_look() -> None:
    logits = logits_of(5, vocab=5000)
    for top_p in (0.5, 0.999):
        params = SamplingParams(top_p=top_p, temperature=3.0)
        probs = reference_probs(logits[0].double().numpy(), params)
        states = [state(seed=seed, top_p=top_p, temperature=3.0) for seed in range(500)]
        tokens = [s.token for s in Sampler().sample(logits.expand(500, -1), states)]
        assert_drawn_from(tokens, probs)
        assert top_p < 0.9 or (probs > 0).sum() > 2048


# --- filters -------------------------------------------------------------------------------------

rows = st.integers(0, 10_000).map(lambda seed: logits_of(seed, rows=3).softmax(-1))
wide_or_off = st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0])


@given(rows, st.lists(st.integers(0, VOCAB + 2), min_size=3, max_size=3))
def test_top_k_against_the_reference(probs: torch.Tensor, top_k: list[int]) -> None:
    kept = probs.clone()
    sampler.keep_top_k(kept, top_k)
    for row, k in enumerate(top_k):
        values = probs[row].tolist()
        threshold = sorted(values, reverse=True)[min(k, VOCAB) - 1] if k else 0.0
        assert kept[row].tolist() == [value if value >= threshold else 0.0 for value in values]


@given(rows, st.lists(wide_or_off, min_size=3, max_size=3))
def test_top_p_against_the_reference(probs: torch.Tensor, top_p: list[float]) -> None:
    kept = probs.clone()
    sampler.keep_top_p(kept, top_p)
    for row, p in enumerate(top_p):
        values = probs[row].double().tolist()
        ordered = sorted(values, reverse=True)
        needed = next((n for n in range(1, VOCAB + 1) if sum(ordered[:n]) >= p * sum(values)), VOCAB)
        threshold = ordered[needed - 1] if p < 1 else 0.0
        assert kept[row].double().tolist() == [value if value >= threshold else 0.0 for value in values]


@given(rows, st.lists(wide_or_off, min_size=3, max_size=3))
def test_min_p_against_the_reference(probs: torch.Tensor, min_p: list[float]) -> None:
    kept = probs.clone()
    sampler.keep_min_p(kept, min_p)
    for row, p in enumerate(min_p):
        threshold = torch.tensor(p) * probs[row].max()
        assert torch.equal(kept[row], torch.where(probs[row] >= threshold, probs[row], 0.0))


def test_the_two_ways_to_a_nucleus_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = logits_of(6, rows=20, vocab=3000).softmax(-1)
    shares = [(row + 1) / 21 for row in range(20)]
    at_once = probs.clone()
    sampler.keep_top_p(at_once, shares)
    monkeypatch.setattr(sampler, "_NUCLEUS", 3)
    narrow = probs.clone()
    sampler.keep_top_p(narrow, shares)
    assert torch.equal(at_once, narrow)


# --- penalties -----------------------------------------------------------------------------------

tokens_ = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.8]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.6]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 2.0]), max_size=3),
    },
)


@given(st.lists(st.tuples(tokens_, tokens_, penalties), min_size=1, max_size=4), st.integers(0, 999))
def test_penalties_and_biases_against_their_formulas(
    sequences: list[tuple[list[int], list[int], dict[str, object]]], seed: int
) -> None:
    logits = logits_of(seed, rows=len(sequences))
    states = [state(prompt, output, temperature=0, **params) for prompt, output, params in sequences]
    before = logits.clone()
    chosen = Sampler().sample(logits, states)
    assert torch.equal(logits, before), "the caller's logits were changed"
    for row, (prompt, output, _) in enumerate(sequences):
        scores = reference_scores(logits[row].double().numpy(), states[row].params, prompt, output)
        assert scores[chosen[row].token] >= scores.max() - 1e-5


def test_a_penalised_loop_is_left() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    looping = state(frequency_penalty=0.2, temperature=0)
    tokens = []
    for _ in range(4):
        [choice] = Sampler().sample(logits, [looping])
        looping.advance(choice.token)
        tokens.append(choice.token)
    assert tokens == [0, 1, 0, 1]


# --- batches -------------------------------------------------------------------------------------

any_params = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0])},
    optional={
        "top_k": st.integers(0, 50),
        "top_p": wide_or_off,
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=2),
        "logprobs": st.integers(-1, 4),
    },
)


@given(st.lists(st.tuples(tokens_, tokens_, any_params), min_size=1, max_size=6), st.integers(0, 999))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    sequences: list[tuple[list[int], list[int], dict[str, object]]], seed: int
) -> None:
    logits = logits_of(seed, rows=len(sequences))
    states = [state(prompt, output, **params) for prompt, output, params in sequences]
    together = Sampler().sample(logits, states)
    backwards = Sampler().sample(logits.flip(0), states[::-1])[::-1]
    alone = [Sampler().sample(logits[row : row + 1], [states[row]])[0] for row in range(len(states))]
    assert [s.token for s in together] == [s.token for s in backwards] == [s.token for s in alone]
    for one, other in zip(together, alone, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob)


# --- greedy, log probabilities, faults -----------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    greedy = [{"temperature": 0.0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}]
    tokens = [s.token for s in Sampler().sample(logits, [state(seed=3, **params) for params in greedy])]
    for row, token in enumerate(tokens):
        assert logits[row, token] == logits[row].max()


def test_plain_greedy_rows_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = sampler.keep_top_p
    monkeypatch.setattr(
        "services.executor.sampling.sampler.keep_top_p",
        lambda probs, top_p, totals: (seen.append(len(top_p)), original(probs, top_p, totals)),
    )
    logits = logits_of(1, rows=3)
    Sampler().sample(logits, [state(temperature=0)] * 3)
    assert seen == []
    Sampler().sample(logits, [state(temperature=0), state(top_p=0.5), state(temperature=0)])
    assert seen == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_are_the_model_s(device: str) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    states = [
        state(temperature=0.1, logit_bias={7: 100.0}, logprobs=2),
        state(temperature=0),
        state(temperature=0, logprobs=0),
    ]
    first, second, third = Sampler().sample(logits, states)
    assert first.token == 7
    expected = logits[0].log_softmax(-1).tolist()
    assert first.logprobs.logprob == pytest.approx(expected[7], abs=1e-5)
    best = sorted(range(VOCAB), key=lambda token: -expected[token])[:2]
    assert [token for token, _ in first.logprobs.top] == best
    assert [value for _, value in first.logprobs.top] == pytest.approx([expected[token] for token in best])
    assert second.logprobs is None
    assert third.logprobs.top == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_an_error_and_never_a_token(bad: float, temperature: float) -> None:
    logits = logits_of(1, rows=3)
    logits[1, 5] = bad
    with pytest.raises(BadLogits, match=r"rows \[1\]") as caught:
        Sampler().sample(logits, [state(temperature=temperature)] * 3)
    assert isinstance(caught.value, InternalError)
    assert caught.value.rows == [1]
    logits[1] = -float("inf")
    with pytest.raises(InternalError, match="NaN or infinite"):
        Sampler().sample(logits, [state(temperature=temperature)] * 3)


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((1, 4), -float("inf"))
    logits[0, 2] = 1.0
    assert {Sampler().sample(logits, [state(seed=seed)])[0].token for seed in range(50)} == {2}


def test_rows_and_states_must_agree() -> None:
    assert Sampler().sample(torch.zeros(0, 4), []) == []
    with pytest.raises(InternalError, match="1 rows of logits for 0"):
        Sampler().sample(torch.zeros(1, 4), [])

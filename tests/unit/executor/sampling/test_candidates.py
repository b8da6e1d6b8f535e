"""What the sampler gets of the logits, and that it chooses as it would with all of them."""

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.collectives.base import Collectives
from services.executor.core.engine import BadLogits, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.sampling.candidates import (
    MOST_CANDIDATES,
    WANT,
    RowLogits,
    RowTable,
    Wants,
    collect,
    threads_for,
)
from services.executor.sampling.sampler import Sampler, wants_of
from shared.messages import SamplingParams
from tests.unit.executor.model.ring import on_ring

VOCAB = 157
Result = TypeVar("Result")


def logits_of(seed: int, rows: int, dtype: torch.dtype, vocab: int = VOCAB) -> torch.Tensor:
    """Coarse logits: many ties, as bf16 weights give."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(rows, vocab, generator=generator) * 8).round() / 4).to(dtype)


def of_leader(
    logits: torch.Tensor, widths: list[int], gather: Callable[[torch.Tensor, Collectives], Result | None]
) -> Result:
    """What rank 0 gets when each rank has its span of `logits`, and no other does."""
    spans = list(pairwise(np.cumsum([0, *widths]).tolist()))

    def work(collectives: Collectives) -> Result | None:
        start, stop = spans[collectives.rank]
        return gather(logits[:, start:stop].contiguous(), collectives)

    first, *others = on_ring(len(widths), work)
    assert others == [None] * (len(widths) - 1)
    assert first is not None
    return first


def on_shards(logits: torch.Tensor, wants: Wants, widths: list[int]) -> RowLogits:
    return of_leader(logits, widths, lambda local, ring: collect(local, wants, ring, widths))


def counts(*wanted: int) -> Wants:
    wants = np.zeros(len(wanted), WANT)
    wants["count"] = wanted
    return wants


def spans_of(world_size: int) -> list[int]:
    """Uneven shares of the vocabulary, one of them smaller than what some rows ask for."""
    return {1: [VOCAB], 2: [VOCAB - 3, 3], 3: [50, 7, VOCAB - 57]}[world_size]


def assert_same(found: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            values = [value for _, value in one.logprobs.top]
            assert values == pytest.approx([value for _, value in other.logprobs.top], abs=1e-5)
            assert len({token for token, _ in one.logprobs.top}) == len(values)


tokens_ = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PARAMS: dict[str, st.SearchStrategy[object]] = {
    "top_k": st.sampled_from([0, 1, 2, 5, 40, 150, 200]),
    "top_p": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
    "presence_penalty": st.sampled_from([-0.5, 0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.5]),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-9.0, 3.0]), max_size=2),
    "logprobs": st.integers(-1, 6),
}
params_ = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0])}, optional=PARAMS
)
BANS = {"min_tokens", "allowed_token_ids", "bad_words"}  # tried in test_token_bans.py


# Of each parameter a value that changes what is drawn, or told.
ACTIVE: dict[str, object] = {
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 3.0, 5: -9.0},
    "logprobs": 5,
}


def test_every_sampling_parameter_is_tried() -> None:
    """One that is left out may need more of the logits than `SamplingState.candidates` asks the ranks for."""
    assert ACTIVE.keys() == PARAMS.keys()
    assert {"seed", "temperature"} | PARAMS.keys() | BANS == set(SamplingParams.__struct_fields__)


def test_each_parameter_beside_each_filter_draws_as_from_all_logits() -> None:
    filters: tuple[dict[str, object], ...] = ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1})
    tried = [{**beside, name: ACTIVE[name]} for name in ACTIVE for beside in filters]
    states = [
        SamplingState(SamplingParams(**params, seed=seed), [1, 2], [3, 3])  # type: ignore[arg-type]
        for params in tried
        for seed in range(24)
    ]
    logits = logits_of(5, len(states), torch.bfloat16)
    expected = Sampler().sample(on_shards(logits, np.zeros(len(states), WANT), [VOCAB]), states)
    assert_same(Sampler().sample(on_shards(logits, wants_of(states, VOCAB), spans_of(2)), states), expected)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(tokens_, tokens_, params_), min_size=1, max_size=5),
    st.integers(0, 9999),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_number_of_ranks_samples_as_from_all_logits(
    sequences: list[tuple[list[int], list[int], dict[str, object]]], seed: int, dtype: torch.dtype
) -> None:
    logits = logits_of(seed, len(sequences), dtype)
    states = [SamplingState(SamplingParams(**params), *known) for *known, params in sequences]  # type: ignore[arg-type]
    everything = on_shards(logits, np.zeros(len(states), WANT), [VOCAB])
    expected = Sampler().sample(everything, states)
    for world_size in (1, 2, 3):
        found = on_shards(logits, wants_of(states, VOCAB), spans_of(world_size))
        assert_same(Sampler().sample(found, states), expected)


@settings(max_examples=50)
@given(st.integers(0, 9999), st.lists(st.sampled_from([1, -1, 2, -3, 30, 156, 500]), min_size=1, max_size=5))
def test_candidates_are_the_largest_and_their_ties(seed: int, wanted: list[int]) -> None:
    logits = logits_of(seed, len(wanted), torch.bfloat16)
    for world_size in (1, 2, 3):
        found = on_shards(logits, counts(*wanted), spans_of(world_size))
        few = found.tables[0] if found.tables else RowTable([], torch.empty(0))
        assert few.rows == [row for row, count in enumerate(wanted) if count != 1]
        for row, count in enumerate(wanted):
            values = logits[row].float().tolist()
            assert found.largest[row] == max(values)
            assert found.tokens[row] == values.index(max(values))
            if count == 1:
                continue
            threshold = sorted(values, reverse=True)[min(abs(count), VOCAB) - 1]
            kept = [token for token, value in enumerate(values) if value >= threshold]
            ids = few.ids[few.rows.index(row)].tolist()
            assert ids[: len(kept)] == kept
            assert set(ids[len(kept) :]) <= {VOCAB}
            if count < 0:
                assert found.log_sums[row] == pytest.approx(float(logits[row].float().logsumexp(-1)), abs=1e-5)


def test_only_rows_that_need_it_come_whole() -> None:
    params = [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.25}, {}]
    params.append({"top_k": MOST_CANDIDATES + 1})
    states = [SamplingState(SamplingParams(**values), [1], []) for values in params]  # type: ignore[arg-type]
    wants = wants_of(states, VOCAB)
    assert wants["count"].tolist() == [1, 5, 0, 0, 0]
    logits = logits_of(3, 5, torch.bfloat16)
    top_k, top_p, whole = on_shards(logits, wants, spans_of(3)).tables
    assert (top_k.rows, top_p.rows, whole.rows) == ([1], [2], [3, 4])
    assert whole.ids is None
    assert torch.equal(whole.scores, logits[3:])
    assert top_p.totals is not None
    weights = ((logits[2].double() - logits[2].max()) / 0.25).exp()
    assert float(top_p.totals[0, 0]) == pytest.approx(float(weights.sum()), rel=1e-6)
    assert top_p.scores.shape[1] < VOCAB / 2


def test_what_edits_need() -> None:
    def needed(**params: object) -> int:
        return SamplingState(SamplingParams(**params), [1, 2, 2], [3, 3]).candidates  # type: ignore[arg-type]

    assert needed(temperature=0) == 1
    assert needed(temperature=0, logprobs=0) == -1
    assert needed(temperature=0, logprobs=7) == -7
    assert needed(temperature=0, repetition_penalty=1.2) == 4, "three tokens may give up their places"
    assert needed(top_k=9, frequency_penalty=0.5, logit_bias={7: -1.0}) == 11, "output tokens alone"
    assert needed(top_k=9, repetition_penalty=0.9) == 0
    assert needed(top_k=9, presence_penalty=-0.1, repetition_penalty=1.5) == 0
    assert needed(top_k=9, logit_bias={7: 1.0}) == 0
    assert needed() == 0


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_no_numbers_are_found_on_any_rank(bad: float, dtype: torch.dtype) -> None:
    states = [SamplingState(SamplingParams(temperature=0, logprobs=2, top_k=3), [], []) for _ in range(3)]
    for token in (0, 60, VOCAB - 1):
        logits = logits_of(1, 3, dtype)
        logits[1, token] = bad
        with pytest.raises(BadLogits, match=r"rows \[1\]"):
            Sampler().sample(on_shards(logits, wants_of(states, VOCAB), spans_of(3)), states)


def test_rows_without_a_positive_logit() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = -logits_of(5, 4, dtype).abs() - 1
        logits[3] = 0
        logits[3, :7] = -0.0
        found = on_shards(logits, counts(1, 1, 1, 1), spans_of(2))
        assert found.tokens.tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (8, 1), (9, 2)])
def test_few_rows_are_computed_by_one_thread(rows: int, expected: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(rows):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

"""Draws on the device are those of the sampler on the host, token for token."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.engine import BadLogits
from services.executor.core.sampling_state import SamplingState
from services.executor.gpu.kernels import sampling
from services.executor.gpu.sampling import DeviceSampler, largest_of_ranks, resolve, tell
from services.executor.sampling.sampler import Sampler
from shared.messages import SamplingParams
from tests.unit.executor.model.ring import on_ring

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several chunks, without large vocabularies."""
    monkeypatch.setattr(sampling, "BLOCK", 32)


def state(position: int = 0, **params: object) -> SamplingState:
    return SamplingState(SamplingParams(**params), [], [0] * position)  # type: ignore[arg-type]


def drawn(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    sampler = DeviceSampler(len(states) + 3, logits.shape[1], DEVICE)
    logits = logits.to(DEVICE)
    pending = sampler.sample(logits, *logits.max(dim=-1), states)
    found = [token.token for token in pending.wait()]
    assert sampler.tokens[: len(states)].tolist() == found
    return found


def expected(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return [token.token for token in Sampler().sample(logits, states)]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 40, 500]),
        "top_p": st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.5, 0.95, 0.999999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 3),
    }
)


@given(
    st.integers(0, 2**32),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([0.0, 1.0, 6.0]),
    st.booleans(),
    st.sampled_from([1, 20, 50]),
    st.lists(PARAMS, min_size=1, max_size=ROWS),
)
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_tokens_are_those_of_the_sampler_on_the_host(
    seed: int, dtype: torch.dtype, spread: float, coarse: bool, vocab: int, params: list[dict[str, object]]
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(params), vocab), generator=random) * spread
    if coarse:  # many ties
        logits = (logits * 2).round() / 2
    states = [state(**one) for one in params]  # type: ignore[arg-type]
    logits = logits.to(dtype)
    assert drawn(logits, states) == expected(logits, states)


def test_what_ties_at_a_filters_boundary_is_kept() -> None:
    """Exact shares: all weights are 1, or powers of two; what ties is kept, at either end of the numbers."""
    flat = torch.zeros(48)
    few = torch.full((48,), -300.0)
    few[[5, 40]], few[[6, 47]] = 0.0, -200.0
    signs = torch.cat((torch.full((24,), -0.0), torch.zeros(24)))
    rows = [flat, few, signs, flat - 7.0]
    logits = torch.stack(rows).bfloat16()
    states = [state(temperature=1.0, top_p=0.5, top_k=3, seed=at) for at in range(len(rows))]
    assert drawn(logits, states) == expected(logits, states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_set_that_reaches_its_share_exactly_is_enough(dtype: torch.dtype) -> None:
    """Nucleus sampling keeps the smallest set whose sum is at least p: of weights 1, 1/2, 1/4 and 1/4 the first for
    p = 1/2, the first two for 3/4. So does top-k by counts. A high number draws the last that is kept."""
    logits = torch.full((4, 40), -300.0)
    logits[:, 7:11] = -torch.tensor([0.0, 1.0, 2.0, 2.0])
    seed = next(seed for seed in range(100) if state(seed=seed).uniform() > 0.95)
    filters = [{"top_p": 0.5}, {"top_p": 0.75}, {"top_k": 1}, {"top_k": 2}]
    states = [state(temperature=1 / np.log(2), seed=seed, **one) for one in filters]
    assert drawn(logits.to(dtype), states) == expected(logits.to(dtype), states) == [7, 8, 7, 8]


def test_a_wide_top_k_compares_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond `MOST_CANDIDATES` the host has whole rows, and compares weights: logits may differ that weigh the same."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.rand((2, 1200), generator=generator) * 1e-5
    monkeypatch.setattr(sampling, "BLOCK", 1024)
    states = [state(temperature=100.0, top_k=1100, seed=seed) for seed in (3, 4)]
    assert drawn(logits, states) == expected(logits, states)


def test_rows_that_are_no_numbers_are_told_and_harm_no_other() -> None:
    logits = torch.zeros((4, 40), dtype=torch.bfloat16)
    logits[1, 7] = float("nan")
    logits[3, 7] = float("inf")
    logits[2, 9] = 5.0
    states = [state(temperature=1.0, top_p=0.9, top_k=5), *[state(temperature=0.5, top_p=0.5)] * 3]
    with pytest.raises(BadLogits) as failed:
        drawn(logits, states)
    assert list(failed.value.rows) == [1, 3]


def test_steps_follow_each_other_before_they_are_waited_for() -> None:
    generator = torch.Generator().manual_seed(8)
    sampler = DeviceSampler(3, 40, DEVICE)
    before: list[tuple[object, list[int]]] = []
    for step in range(5):
        logits = torch.randn((3, 40), generator=generator).to(DEVICE)
        states = [state(position=step, temperature=1.0, seed=row) for row in range(3)]
        pending = sampler.sample(logits, *logits.max(dim=-1), states)
        before.append((pending, expected(logits, states)))
        if step:
            earlier, tokens = before[step - 1]
            assert [token.token for token in earlier.wait()] == tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("params", "host"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_k": 4, "top_p": 0.5, "min_p": 0.1}, False),
        ({"presence_penalty": 1.0}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logprobs": 0}, True),
        ({"bad_words": [[3]]}, True),
        ({"allowed_token_ids": [3]}, True),
    ],
)
def test_edited_rows_need_the_host(params: dict[str, object], host: bool) -> None:
    assert state(**params).needs_host is host


def test_token_ids_are_resolved_where_they_lie() -> None:
    ids = torch.tensor([5, -1, -3, 0], dtype=torch.int32)
    before = torch.tensor([70, 80, 90], dtype=torch.int64)
    found = resolve(ids, before)
    assert found.tolist() == [5, 70, 90, 0]
    assert found.dtype == torch.int32


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_largest_of_all_ranks(world_size: int) -> None:
    logits = torch.tensor(
        [[1.0, 7.0, 7.0, 0.0, 7.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 9.0], [3.0, 0.0, float("nan"), 0, 9, 9]]
    )
    width = logits.shape[1] // world_size

    def find(collectives: Collectives) -> tuple[list[float], list[int]]:
        start = collectives.rank * width
        local = logits[:, start : start + width].max(dim=-1)
        values, tokens = largest_of_ranks(*local, collectives, start)
        return values.tolist(), tokens.tolist()

    found = [find(SingleRank())] if world_size == 1 else on_ring(world_size, find)
    for values, tokens in found:
        assert tokens == [1, 5, 2]
        np.testing.assert_equal(values, [7.0, 9.0, float("nan")])


def test_rank_0_tells_its_tokens() -> None:
    def told(collectives: Collectives) -> list[int]:
        return tell(torch.tensor([4, 5]) + 100 * collectives.rank, collectives).tolist()

    assert on_ring(2, told) == [[4, 5], [4, 5]]

"""How the processor for vLLM draws: by the weights, never what has none, and hardly otherwise where weights err."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.engines.vllm.plugin.ryzanstein_vllm.draws import LEVELS, draw, streams_of, uniforms


def numbers(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(uniforms(streams_of([seed] * rows), range(rows)))


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 63, 64, 65, 600])
def test_each_column_is_drawn_as_often_as_it_weighs(columns: int) -> None:
    weights = torch.from_numpy(np.random.default_rng(columns).exponential(size=columns).astype(np.float32))
    weights[::3] = 0
    weights[-1] = 2
    drawn = draw(weights.expand(40_000, columns), numbers(40_000))
    shares = torch.bincount(drawn, minlength=columns) / 40_000
    assert not shares[weights == 0].any()
    assert (shares - weights / weights.sum()).abs().max() < 0.01


@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 0.5, 1.0]), min_size=1, max_size=90).filter(any),
    st.lists(st.sampled_from([0.0, 0.5, 1 - 2.0**-52]), min_size=LEVELS, max_size=LEVELS),
)
def test_what_weighs_nothing_is_never_drawn(weights: list[float], at: list[float]) -> None:
    row = torch.tensor([weights])
    assert row[0, draw(row, torch.tensor([at], dtype=torch.float64))] > 0


def test_errors_of_the_weights_hardly_change_what_is_drawn() -> None:
    """One number, against the running sum over all, falls on the other side of a border every hundredth time."""
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.normal(0, 3, (400, 20_000)))
    exact, wrong = (each.exp().float() for each in (logits, logits + torch.from_numpy(random.normal(0, 1e-4, 20_000))))
    at = numbers(400)
    whole = [
        torch.searchsorted(one.cumsum(-1, dtype=torch.float64), at[:, :1] * one.sum(-1, True)) for one in (exact, wrong)
    ]
    assert int((whole[0] != whole[1]).sum()) > 3
    assert int((draw(exact, at) != draw(wrong, at)).sum()) <= 1


def test_numbers_are_of_their_seed_position_and_level_alone() -> None:
    alone = [uniforms(streams_of([seed]), [position])[0] for seed in (3, 1 << 63) for position in (0, 1, 1 << 30)]
    together = uniforms(streams_of([3] * 3 + [1 << 63] * 3), [0, 1, 1 << 30] * 2)
    assert (together == np.array(alone)).all()
    assert len(np.unique(together)) == together.size
    assert (together >= 0).all()
    assert (together < 1).all()

"""Log probabilities by blocks of the vocabulary are those of all logits at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.training.base import log_probs
from services.executor.training.base.log_probs import Head
from services.executor.training.base.weights import PlainWeight, Scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "_BLOCK", 7)
    monkeypatch.setattr(log_probs, "_TILE", 21)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12),
    vocabulary=st.integers(1, 40),
    spread=st.sampled_from([0.01, 1.0, 40.0]),
    scale=st.sampled_from([1.0, 0.25]),
    cap=st.sampled_from([0.0, 3.0]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_all_logits(
    rows: int, vocabulary: int, spread: float, scale: float, cap: float, biased: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, 5, generator=generator) * spread
    bias = torch.randn(vocabulary, generator=generator) if biased else None
    states = torch.randn(rows, 5, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    head = Head(PlainWeight(weight), bias, scale, cap, Scratch(torch.float32, CPU))

    ours = states.clone().requires_grad_()
    found, likeliest = head.log_probs(ours, targets)
    (found * upstream).sum().backward()  # type: ignore[no-untyped-call]

    theirs = states.double().requires_grad_()
    logits = torch.nn.functional.linear(theirs, weight.double(), None if bias is None else bias.double()) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected * upstream).sum().backward()

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=2e-5 * max(1.0, spread))
    clear = (logits.topk(min(2, vocabulary)).values.diff().abs() > 1e-4).flatten() if vocabulary > 1 else None
    right = logits.argmax(-1) == targets
    assert torch.equal(likeliest if clear is None else likeliest[clear], right if clear is None else right[clear])


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    head = Head(PlainWeight(torch.randn(30, 5)), None, 1.0, 0.0, Scratch(torch.float32, CPU))
    found, likeliest = head.log_probs(torch.randn(4, 5), torch.tensor([1, 2, 3, 4]))
    assert not found.requires_grad
    assert not likeliest.requires_grad
    assert head.log_probs(torch.randn(0, 5), torch.zeros(0, dtype=torch.int64))[0].shape == (0,)

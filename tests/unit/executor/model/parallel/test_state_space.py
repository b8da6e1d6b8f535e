"""Mamba 2's scan and lightning attention in blocks, from any state, against their definitions token by token."""

import torch
from torch import Tensor

from services.executor.model.parallel.mixers.lightning import faded
from services.executor.model.parallel.mixers.state_space import scanned

GROUPS, EACH, WIDTH, STATE = 2, 3, 4, 5
RATES = -torch.tensor([[0.003, 0.2, 4.0], [0.05, 1.0, 16.0]])


def made(tokens: int) -> tuple[Tensor, ...]:
    """x, steps, rates, B and C of two sequences."""
    torch.manual_seed(0)
    return (
        torch.randn(2, tokens, GROUPS, EACH, WIDTH),
        torch.rand(2, tokens, GROUPS, EACH),
        RATES,
        torch.randn(2, tokens, GROUPS, STATE),
        torch.randn(2, tokens, GROUPS, STATE),
    )


def test_a_text_is_what_its_tokens_make_one_by_one() -> None:
    x, steps, rates, before, behind = made(150)  # three blocks
    state = first = torch.randn(2, GROUPS, EACH, WIDTH, STATE)
    expected = []
    for token in range(x.shape[1]):
        taken = steps[:, token, :, :, None, None]
        added = x[:, token, ..., None] * before[:, token, :, None, None]
        state = torch.exp(rates[..., None, None] * taken) * state + taken * added
        expected.append((state @ behind[:, token, :, None, :, None]).squeeze(-1))
    out, last = scanned(x, steps, rates, before, behind, first)
    torch.testing.assert_close(out, torch.stack(expected, dim=1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-4, rtol=1e-4)


def test_steps_so_long_that_nothing_is_left_of_a_state_are_no_nan() -> None:
    x, steps, rates, before, behind = made(70)
    out, last = scanned(x, steps * 1e4, rates, before, behind, torch.full((2, GROUPS, EACH, WIDTH, STATE), 1e4))
    assert out.isfinite().all()
    assert last.isfinite().all()


def test_a_block_of_lightning_attention_is_what_its_tokens_make_one_by_one() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 70, 4).unbind()
    state = first = torch.randn(2, 3, 4, 4)
    rates = torch.tensor([0.004, 0.1, 3.0]).view(3, 1, 1)
    expected = []
    for token in range(70):
        state = torch.exp(-rates) * state + key[:, :, token, :, None] * value[:, :, token, None]
        expected.append((query[:, :, token, None] @ state)[:, :, 0])
    out, behind = faded(query, key, value, first, rates)
    torch.testing.assert_close(out, torch.stack(expected, dim=2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(behind, state, atol=1e-4, rtol=1e-4)


def test_two_blocks_of_lightning_attention_are_one() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 9, 4).unbind()
    rates = torch.tensor([0.01, 0.5]).view(2, 1, 1)
    whole, last = faded(query, key, value, torch.zeros(1, 2, 4, 4), rates)
    head, state = faded(query[:, :, :5], key[:, :, :5], value[:, :, :5], torch.zeros(1, 2, 4, 4), rates)
    tail, state = faded(query[:, :, 5:], key[:, :, 5:], value[:, :, 5:], state, rates)
    torch.testing.assert_close(torch.cat((head, tail), dim=2), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)

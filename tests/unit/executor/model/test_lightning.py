"""Lightning attention in blocks, from any state, against its definition token by token."""

import torch

from services.executor.model.parallel.mixers.lightning import faded


def test_a_block_is_what_its_tokens_make_one_by_one() -> None:
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


def test_two_blocks_are_one() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 9, 4).unbind()
    rates = torch.tensor([0.01, 0.5]).view(2, 1, 1)
    whole, last = faded(query, key, value, torch.zeros(1, 2, 4, 4), rates)
    head, state = faded(query[:, :, :5], key[:, :, :5], value[:, :, :5], torch.zeros(1, 2, 4, 4), rates)
    tail, state = faded(query[:, :, 5:], key[:, :, 5:], value[:, :, 5:], state, rates)
    torch.testing.assert_close(torch.cat((head, tail), dim=2), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)

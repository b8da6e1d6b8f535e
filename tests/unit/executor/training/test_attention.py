"""Attention over packed examples against softmax over all scores, with what models ask of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.executor.training.base import attention
from services.executor.training.base.attention import CURRENT_ATTRIBUTE, packed_attention
from services.executor.training.base.linear import Pass
from shared.errors import ModelLoadError

LENGTHS = [1, 19, 6]


def naive(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[heads, L, d] of one example, float64."""
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[1])
    back = at[:, None] - at
    hidden = (back < 0) | (back >= (window or len(at)))
    scores = scores.masked_fill(hidden, float("-inf"))
    column = torch.full((*scores.shape[:2], 1), float("-inf"), dtype=scores.dtype)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand_as(column)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(group, 0)


@pytest.mark.parametrize("short", [0, 256], ids=["fused", "plain"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rule", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_each_example_attends_to_itself(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any], window: int | None, short: int
) -> None:
    monkeypatch.setattr(attention, "_SHORT", short)
    monkeypatch.setattr(attention, "_ROWS", 5)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, sum(LENGTHS), 8, generator=generator) for heads in (4, 2, 2)]
    ours = [part.clone().requires_grad_() for part in parts]
    theirs = [part.double().requires_grad_() for part in parts]
    module: Any = SimpleNamespace(**{CURRENT_ATTRIBUTE: [Pass(lengths=LENGTHS)]})
    out, _ = packed_attention(module, *ours, None, scaling=0.3, sliding_window=window, **rule)
    cut = zip(*(torch.split(part[0], LENGTHS, dim=1) for part in theirs), strict=True)
    expected = [naive(*example, window, rule.get("softcap"), rule.get("s_aux")) for example in cut]
    wanted = torch.cat(expected, dim=1).transpose(0, 1).unsqueeze(0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(out.shape, generator=generator)
    out.backward(upstream)  # type: ignore[no-untyped-call]
    wanted.backward(upstream.double())  # type: ignore[no-untyped-call]
    for one, other in zip(ours, theirs, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_express_is_refused() -> None:
    module: Any = nn.Identity()
    module.__dict__[CURRENT_ATTRIBUTE] = [Pass(lengths=[2])]
    some = torch.randn(1, 2, 2, 8)
    with pytest.raises(ModelLoadError, match="asks for key_bias"):
        packed_attention(module, some, some, some, None, key_bias=torch.zeros(2))

"""Latent attention: lines as they are, or keys and values made of them, come to the same."""

import math

import pytest
import torch
from torch import nn

from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.model.parallel import latent
from services.executor.model.parallel.latent import LatentWeight
from services.executor.model.step_context import ScoreRule
from shared.errors import ModelLoadError

HEADS, PLAIN, ROTATED, VALUE, RANK = 5, 8, 4, 10, 16
ROWS = PLAIN + VALUE


def weight_of(rank: int = 0, ranks: int = 1) -> LatentWeight:
    linear = nn.Linear(RANK, HEADS * ROWS, bias=False)
    layout = ShardLayout.of(HeadCounts(HEADS, 1, PLAIN + ROTATED, VALUE), ranks, rank)
    weight = LatentWeight(linear, layout, ROTATED)
    held = linear.weight.detach().view(HEADS, ROWS, RANK)[layout.q_heads.start : layout.q_heads.stop]
    weight.weight = nn.Parameter(held.flatten(0, 1), requires_grad=False)
    return weight


def attended(weight: LatentWeight, rows: int, context: int, mask: torch.Tensor | None, expands: bool) -> torch.Tensor:
    torch.manual_seed(3)
    query = torch.randn(rows, weight.heads, PLAIN + ROTATED)
    lines = torch.randn(context, RANK + ROTATED)
    weight.expands_from = 0 if expands else math.inf
    rule = ScoreRule(0.3, sinks=torch.randn(1, weight.heads))
    return latent._attend_chunk(query, lines, mask, weight, rule)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_lines_and_expanded_heads_come_to_the_same(monkeypatch: pytest.MonkeyPatch, fresh: bool, limit: int) -> None:
    """However few heads are computed at once, for want of memory."""
    monkeypatch.setattr(latent, "_CPU_BYTES", limit)
    rows, context = (7, 7) if fresh else (3, 11)
    mask = None if fresh else torch.full((rows, context), float("-inf")).triu(context - rows + 1)
    weight = weight_of()
    torch.testing.assert_close(
        attended(weight, rows, context, mask, expands=True),
        attended(weight, rows, context, mask, expands=False),
        rtol=1e-5,
        atol=1e-5,
    )


def test_long_chunks_alone_make_keys_and_values_of_lines() -> None:
    """DeepSeek V3's sizes: from 171 rows on what that costs is saved again."""
    layout = ShardLayout.of(HeadCounts(128, 1, 192, 128), 8, 0)
    weight = LatentWeight(nn.Linear(512, 128 * 256, bias=False, device="meta"), layout, 64)
    assert weight.expands_from == pytest.approx(170.67, abs=0.01)


def test_a_rank_holds_the_rows_of_its_heads() -> None:
    shares = [weight_of(rank, 3) for rank in range(3)]
    assert [share.heads for share in shares] == [2, 2, 1]
    assert [len(share.weight) for share in shares] == [2 * ROWS, 2 * ROWS, ROWS]


def test_a_weight_of_another_shape_is_refused() -> None:
    layout = ShardLayout.of(HeadCounts(HEADS, 1, PLAIN + ROTATED, VALUE), 1, 0)
    with pytest.raises(ModelLoadError, match="makes 91 keys and values of a latent"):
        LatentWeight(nn.Linear(RANK, HEADS * ROWS + 1, bias=False), layout, ROTATED)

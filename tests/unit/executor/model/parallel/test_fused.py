"""Rows of fused projections, against what the names of the rows say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.sharding import HeadCounts, ShardLayout, ShardRange
from services.executor.model.parallel.layers import halves, merged
from services.executor.model.parallel.splitting import blocks, by_fourth, by_group
from shared.errors import ModelLoadError

HEAD_DIM = 2


@st.composite
def rings(draw: st.DrawFn) -> list[ShardLayout]:
    kv_heads = draw(st.integers(1, 9))
    total = HeadCounts(kv_heads * draw(st.integers(1, 5)), kv_heads, HEAD_DIM)
    world_size = draw(st.integers(1, min(total.q_heads, 7)))
    return [ShardLayout.of(total, world_size, rank) for rank in range(world_size)]


def rows(names: list[tuple[str, int]], spans: tuple[ShardRange, ...]) -> list[tuple[str, int]]:
    """The heads that `spans` read, in order, of a projection whose heads are `names`."""
    labels = [name for name in names for _ in range(HEAD_DIM)]
    read = [label for span in spans for label in labels[span.start : span.stop]]
    heads = read[::HEAD_DIM]
    assert read == [head for head in heads for _ in range(HEAD_DIM)], "whole heads only"
    return heads


def heads(kind: str, span: ShardRange) -> list[tuple[str, int]]:
    return [(kind, head) for head in range(span.start, span.stop)]


@given(rings())
def test_blocks(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    names = heads("q", ShardRange(0, total.q_heads)) + heads("k", ShardRange(0, total.kv_heads))
    names += heads("v", ShardRange(0, total.kv_heads))
    for layout in ring:
        expected = heads("q", layout.q_heads) + heads("k", layout.kv_heads) + heads("v", layout.kv_heads)
        assert rows(names, blocks(layout)) == expected


@given(rings())
def test_by_group(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    group = total.q_heads // total.kv_heads
    names = []
    for kv_head in range(total.kv_heads):
        names += heads("q", ShardRange(0, group).scaled(1))
        names[-group:] = heads("q", ShardRange(kv_head * group, (kv_head + 1) * group))
        names += [("k", kv_head), ("v", kv_head)]
    for layout in ring:
        expected = []
        for index in range(layout.kv_heads.size):
            first = layout.q_heads.start + index * layout.q_per_kv
            kv_head = layout.kv_heads.start + index
            expected += heads("q", ShardRange(first, first + layout.q_per_kv))
            expected += [("k", kv_head), ("v", kv_head)]
        assert rows(names, by_group(layout)) == expected


@given(st.integers(1, 4), st.integers(1, 4))
def test_by_fourth(fourth: int, world_size: int) -> None:
    total = HeadCounts(4 * fourth, 4 * fourth, HEAD_DIM)
    names = []
    for first in range(0, 4 * fourth, fourth):
        names += [name for kind in "qvk" for name in heads(kind, ShardRange(first, first + fourth))]
    for rank in range(world_size):
        layout = ShardLayout.of(total, world_size, rank)
        expected = [name for kind in "qkv" for name in heads(kind, layout.q_heads)]
        assert rows(names, by_fourth(layout)) == expected


@pytest.mark.parametrize("counts", [(6, 6), (8, 4)])
def test_heads_that_make_no_fourths_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ModelLoadError, match=rf"{counts[0]} attention heads do not make four equal parts"):
        by_fourth(ShardLayout.of(HeadCounts(*counts, HEAD_DIM), 1, 0))


@given(rings())
def test_every_kv_head_counts_once(ring: list[ShardLayout]) -> None:
    counted = [head for layout in ring for _, head in heads("k", layout.counted_kv_heads)]
    assert counted == list(range(ring[0].total.kv_heads))


def test_neighbours_are_read_at_once() -> None:
    assert merged([ShardRange(0, 2), ShardRange(2, 5), ShardRange(7, 8)]) == (ShardRange(0, 5), ShardRange(7, 8))
    assert halves(ShardRange(2, 4), 6) == (ShardRange(2, 4), ShardRange(8, 10))
    assert halves(ShardRange(0, 6), 6) == (ShardRange(0, 12),)
    whole = ShardLayout.of(HeadCounts(6, 3, HEAD_DIM), 1, 0)
    assert by_group(whole) == blocks(whole) == (ShardRange(0, 24),)

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.attention import paged_attention
from services.executor.model.step_context import StepContext, bucket_bounds
from shared.errors import ModelLoadError
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script

SHAPE = StoreShape.uniform(num_layers=1, block_size=BLOCK_SIZE, kv_heads=2, head_dim=8, dtype=torch.float32)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(1, 1000))
def test_buckets_cover_all_within_their_limits(lengths: list[int], most: int) -> None:
    blocks = np.array(sorted(lengths, reverse=True))
    bounds = bucket_bounds(blocks, most)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(len(blocks)))
    for start, stop in bounds:
        longest, shortest = blocks[start], blocks[stop - 1]
        assert stop - start == 1 or (stop - start) * longest <= most
        assert shortest >= min(longest * 0.75, longest - 2)


def test_no_decodes_no_buckets() -> None:
    assert bucket_bounds(np.array([], dtype=np.int64), 8) == []


def test_padding_and_masks_of_decodes() -> None:
    script = Script([20, 3, 9])
    script.step({0: 18, 1: 2, 2: 8})
    plan, _ = script.step({0: 1, 1: 1, 2: 1})
    step = StepContext(plan, KvStore(SHAPE, NUM_BLOCKS, CPU), lambda: None)
    batch = step.decodes(None)
    assert batch.order.tolist() == [0, 2, 1]
    seen = [int((bucket.mask == 0).sum()) for bucket in batch.buckets]
    assert sum(seen) == 19 + 9 + 3
    windowed = step.decodes(5)
    assert sum(int((bucket.mask == 0).sum()) for bucket in windowed.buckets) == 5 + 5 + 3
    assert max(bucket.mask.shape[-1] for bucket in windowed.buckets) <= 2 * BLOCK_SIZE
    assert step.decodes(5) is windowed


def test_a_first_chunk_needs_neither_gather_nor_mask() -> None:
    script = Script([20])
    step = StepContext(script.step({0: 8})[0], KvStore(SHAPE, NUM_BLOCKS, CPU), lambda: None)
    (first,) = step.prefills(None)
    assert (first.start, first.stop, first.blocks, first.mask) == (0, 8, None, None)
    (windowed,) = step.prefills(3)
    assert windowed.blocks is None
    assert windowed.mask is not None
    assert (windowed.mask == 0).sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    later = StepContext(script.step({0: 6})[0], KvStore(SHAPE, NUM_BLOCKS, CPU), lambda: None)
    (second,) = later.prefills(3)
    assert second.blocks is not None
    assert len(second.blocks) == 3
    assert second.mask is not None
    assert (second.mask == 0).sum(1).tolist() == [3] * 6


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_gates": torch.zeros(4)}, "head_gates"),
        ({"is_causal": False}, "is_causal"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(arguments: dict[str, object], reason: str) -> None:
    step = StepContext(Script([8]).step({0: 8})[0], KvStore(SHAPE, NUM_BLOCKS, CPU), lambda: None)
    query, key = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    with pytest.raises(ModelLoadError, match=reason):
        paged_attention(torch.nn.Module(), query, key, key, None, step=step, **arguments)
    with pytest.raises(ModelLoadError, match="attention_mask"):
        paged_attention(torch.nn.Module(), query, key, key, torch.zeros(8, 8), step=step)

"""Every rank of a ring makes a store of as many blocks, compressed alike."""

import pytest
import torch

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.kv_cache.capacity import BlockCounts, StoreShape, hot_reserve, plan_store
from services.executor.kv_cache.codecs import FP8, INT8
from shared.config import load_settings
from shared.errors import ConfigurationError
from tests.unit.executor.model.ring import CPU, on_ring

HEADS = HeadCounts(q_heads=9, kv_heads=3, head_dim=64)
"""Three KV heads for two ranks: each holds two."""


def plan(
    settings: ExecutorSettings, collectives: Collectives, context: int = 1024, native: bool = False
) -> tuple[StoreShape, BlockCounts]:
    layout = ShardLayout.of(HEADS, collectives.world_size, collectives.rank)
    return plan_store(settings, 4, layout, torch.bfloat16, native, context, CPU, collectives)


def agree(settings: ExecutorSettings, native: bool = False) -> list[BlockCounts]:
    def one(collectives: Collectives) -> BlockCounts:
        return plan(settings, collectives, native=native)[1]

    return on_ring(2, one)


def test_uncompressed_all_blocks_are_hot() -> None:
    # Either share: 4 layers, 2 heads, 16 tokens of 64 values, keys and values, two bytes each.
    assert agree(load_settings(ExecutorSettings, kv_memory=1000 * 4 * 2 * 16 * 64 * 2 * 2)) == [(1000, 0)] * 2


def test_compressed_the_budget_goes_to_cold_blocks() -> None:
    settings = load_settings(ExecutorSettings, kv_memory=500_000_000, kv_dtype="int8")
    first, second = agree(settings)
    assert first == second
    assert first.hot == hot_reserve(settings.max_sequences, settings.max_batch_tokens, settings.block_size)
    plain = agree(load_settings(ExecutorSettings, kv_memory=500_000_000))[0]
    assert sum(first) > 1.9 * plain.hot


def test_auto_compresses_where_the_native_kernels_compute() -> None:
    for native, codecs in ((True, (INT8,) * 4), (False, (None,) * 4)):
        shape, blocks = plan(load_settings(ExecutorSettings), SingleRank(), native=native)
        assert shape.codecs == codecs
        assert bool(blocks.cold) == native


def test_auto_does_without_where_some_rank_has_too_little_memory() -> None:
    settings = load_settings(ExecutorSettings, kv_memory=70 * 4 * 2 * 16 * 64 * 2 * 2)
    assert agree(settings, native=True) == [(70, 0)] * 2


def test_layers_are_compressed_as_the_settings_say() -> None:
    settings = load_settings(ExecutorSettings, kv_dtype="int8", kv_dtype_layers="0=bf16,-1=fp8")
    shape, _ = plan(settings, SingleRank())
    assert shape.codecs == (None, INT8, INT8, FP8)
    wrong = load_settings(ExecutorSettings, kv_dtype_layers="4=int8")
    with pytest.raises(
        ConfigurationError, match="names layer 4, which the model does not have; choose 0 to 3"
    ):
        plan(wrong, SingleRank())

from pathlib import Path

import pytest
import torch

from services.executor.kv_cache.capacity import (
    BlockCounts,
    StoreShape,
    default_budget,
    plan_blocks,
    plan_num_blocks,
    writable_reserve,
)
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.platforms.cpu import Cpu, control_group_room
from shared.errors import ConfigurationError

PLAIN = StoreShape.uniform(2, 4, 3, 8, torch.bfloat16)
MIXED = StoreShape.uniform(2, 4, 3, 8, torch.bfloat16, (INT8, None))
LAYER = 2 * 3 * 4 * 8  # values of a block in one layer


def test_budget_in_blocks() -> None:
    assert plan_num_blocks(100, 16, 64, budget_bytes=1999) == 19
    assert plan_num_blocks(100, 16, 65, budget_bytes=100_000, cap=3) == 15
    assert plan_num_blocks(100, 16, 65, budget_bytes=700, cap=3) == 7
    with pytest.raises(
        ConfigurationError,
        match=r"holds 64 tokens.* RYZANSTEIN_KV_MEMORY .* to 500 bytes or more, or RYZANSTEIN_CONTEXT_LENGTH .* 64",
    ):
        plan_num_blocks(100, 16, 65, budget_bytes=499)


def test_default_budget_is_a_share_of_what_is_free() -> None:
    assert 0 < default_budget(torch.device("cpu")) < Cpu().free_memory(torch.device("cpu"))[0]


def test_bytes_of_blocks() -> None:
    assert PLAIN.bytes_per_block == PLAIN.bytes_per_quantized_block == MIXED.bytes_per_block == 2 * LAYER * 2
    assert MIXED.bytes_per_quantized_block == (LAYER + 6 * 4) + LAYER * 2
    usual = StoreShape.uniform(30, 16, 3, 64, torch.bfloat16, (FP8,) * 30)
    assert usual.bytes_per_quantized_block / usual.bytes_per_block < 0.503


def test_a_codec_for_each_layer() -> None:
    with pytest.raises(ValueError, match="1 codecs were given for 2 layers"):
        StoreShape.uniform(2, 4, 3, 8, torch.bfloat16, (INT8,))


def test_writable_blocks_for_the_batch_and_quantized_ones_for_the_rest() -> None:
    assert plan_blocks(PLAIN, 8, 100 * PLAIN.bytes_per_block, reserve=10) == BlockCounts(100, 0)
    writable, quantized = 10 * MIXED.bytes_per_block, MIXED.bytes_per_quantized_block
    assert plan_blocks(MIXED, 8, writable + 50 * quantized, reserve=10) == BlockCounts(10, 50)
    assert plan_blocks(MIXED, 8, writable + 50 * quantized, reserve=10, cap=4) == BlockCounts(10, 8)
    with pytest.raises(ConfigurationError, match=rf"set RYZANSTEIN_KV_MEMORY .* to {writable + 2 * quantized} bytes"):
        plan_blocks(MIXED, 8, writable + 2 * quantized - 1, reserve=10)


def test_the_reserve_covers_what_a_step_can_fill() -> None:
    # 4 sequences that each begin a block in a step of 30 tokens, beside the blocks that they were filling.
    assert writable_reserve(4, 30, 16) >= 4 + 4 + 2


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, [600]),
        ({"memory.max": "1000\n", "memory.current": "1400\n"}, [0]),
        ({"memory.max": "max\n", "memory.current": "400\n"}, []),
        ({"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "400\n"}, [600]),
        ({}, []),
    ],
)
def test_memory_stays_within_the_control_group(tmp_path: Path, files: dict[str, str], room: list[int]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert control_group_room(tmp_path) == room

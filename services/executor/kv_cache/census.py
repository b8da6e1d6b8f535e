"""The blocks of an allocator, counted and checked. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from services.executor.kv_cache.block_pool import PoolCounts
from services.executor.kv_cache.prefix_index import PrefixIndex


class Census(NamedTuple):
    """How many blocks are in which state."""

    hot: PoolCounts
    cold: PoolCounts
    private: int
    shared: int
    host: tuple[int, int]
    """(spill slots, used) in host memory."""
    disk: tuple[int, int]
    pinned_for: dict[str, int]
    """Blocks by session."""


def check_regions(
    references: Sequence[int],
    index: PrefixIndex,
    empty: Collection[int],
    cached: Collection[int],
    pinned: Collection[int],
) -> None:
    """Raises AssertionError where a block (with so many references each) is in no region, or shared while writable."""
    for block, count in enumerate(references):
        assert count >= 0, f"block {block} has {count} references"
        unused = block in empty or block in cached or block in pinned
        assert unused == (count == 0), f"block {block} is leaked or in use while free"
        assert count < 2 or block in index, f"block {block} is shared while writable"
    assert all(block in index for block in (*cached, *pinned)), "a cached block cannot be found"
    assert not any(block in index for block in empty), "an empty block can be found"


def check_tables(references: Sequence[int], tables: Iterable[Sequence[int]]) -> None:
    """Raises AssertionError where the block `tables` of all sequences hold others than `references` count."""
    held = Counter(block for table in tables for block in table)
    counted = {block: count for block, count in enumerate(references) if count}
    assert held == counted, f"tables hold {dict(held)}, the allocator counts {counted}"

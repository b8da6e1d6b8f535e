"""The block allocator: reference counts, prefix reuse, eviction, and no leak under any schedule."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.executor.kv_cache.allocator import BlockAllocator, OutOfBlocks
from services.executor.kv_cache.prefix_index import BlockChain, root_digest

ROOT = root_digest("model")
BLOCK = 4


def chain_of(tokens: list[int]) -> BlockChain:
    return BlockChain(array("i", tokens), BLOCK, ROOT)


def fill(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """A table for `tokens`, its full blocks sealed."""
    chain = chain_of(tokens)
    blocks = allocator.allocate(allocator.blocks_for(len(tokens)))
    for position in range(len(chain)):
        allocator.seal(blocks[position], chain.key(position))
    return blocks


def test_freed_full_blocks_are_found_again_and_the_partial_one_is_not() -> None:
    allocator = BlockAllocator(8, BLOCK)
    tokens = list(range(10))
    blocks = fill(allocator, tokens)
    allocator.release(blocks)
    assert allocator.available == 8
    assert allocator.match(chain_of(tokens), 9) == blocks[:2]
    assert allocator.match(chain_of([*range(4), 99, 98, 97, 96]), 9) == blocks[:1]
    assert allocator.match(chain_of([1, *range(1, 10)]), 9) == []
    allocator.check([])


def test_match_respects_the_limit() -> None:
    allocator = BlockAllocator(8, BLOCK)
    tokens = list(range(8))
    blocks = fill(allocator, tokens)
    # A prompt of exactly two blocks: the second must be computed again, for the logits of its last token.
    assert allocator.match(chain_of(tokens), (len(tokens) - 1) // BLOCK) == blocks[:1]


def test_the_same_tokens_after_another_beginning_do_not_match() -> None:
    allocator = BlockAllocator(8, BLOCK)
    fill(allocator, [1, 1, 1, 1, 2, 2, 2, 2])
    assert allocator.match(chain_of([2, 2, 2, 2]), 9) == []


def test_shared_blocks_stay_until_the_last_release() -> None:
    allocator = BlockAllocator(2, BLOCK)
    blocks = fill(allocator, list(range(8)))
    allocator.share(blocks)
    allocator.release(blocks)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    allocator.check([blocks])
    allocator.release(blocks)
    assert allocator.available == 2
    allocator.check([])


def test_eviction_takes_the_longest_unused_and_ends_before_beginnings() -> None:
    allocator = BlockAllocator(4, BLOCK)
    old = fill(allocator, list(range(8)))
    new = fill(allocator, list(range(100, 108)))
    allocator.release(old)
    allocator.release(new)
    assert allocator.allocate(1) == [old[1]]
    assert allocator.match(chain_of(list(range(8))), 9) == [old[0]]
    assert allocator.allocate(2) == [old[0], new[1]]
    assert allocator.match(chain_of(list(range(100, 108))), 9) == [new[0]]


def test_room_after_counts_cached_blocks_that_would_be_taken() -> None:
    allocator = BlockAllocator(4, BLOCK)
    blocks = fill(allocator, list(range(8)))
    assert allocator.room_after(blocks) == 2
    allocator.release(blocks)
    assert allocator.available == 4
    assert allocator.room_after(blocks) == 2


def test_a_duplicate_of_a_known_block_stays_unregistered() -> None:
    allocator = BlockAllocator(4, BLOCK)
    first, second = fill(allocator, [1, 2, 3, 4]), fill(allocator, [1, 2, 3, 4])
    assert allocator.match(chain_of([1, 2, 3, 4]), 9) == first
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share(second)
    allocator.release(second)
    allocator.check([first])


def test_misuse_is_named() -> None:
    allocator = BlockAllocator(2, BLOCK)
    [block] = allocator.allocate(1)
    allocator.release([block])
    with pytest.raises(ValueError, match="released twice"):
        allocator.release([block])
    with pytest.raises(ValueError, match="cannot be sealed"):
        allocator.seal(block, chain_of([1, 2, 3, 4]).key(0))
    with pytest.raises(OutOfBlocks, match="3 KV blocks"):
        allocator.allocate(3)
    assert allocator.available == 2
    with pytest.raises(ValueError, match="holds nothing"):
        BlockAllocator(0, BLOCK)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._empty.append(a._empty[0]),
        lambda a: a._empty.pop(),
        lambda a: a._references.__setitem__(a._empty[0], 1),
        lambda a: a._references.__setitem__(0, -1),
        lambda a: a._cached.__setitem__(a._empty[0], None),
        lambda a: a._index.remove(0),
    ],
)
def test_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    allocator = BlockAllocator(4, BLOCK)
    blocks = fill(allocator, list(range(4)))
    allocator.share(blocks)
    allocator.check([blocks, blocks])
    damage(allocator)
    with pytest.raises(AssertionError):
        allocator.check([blocks, blocks])


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences with few distinct tokens come, grow, seal, share and go, over a tiny pool.

    Content is tracked beside the allocator: what each block holds, so that a match is verified
    against the truth, and a write to a block that somebody else reads is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(7, BLOCK)
        self.tables: list[tuple[list[int], list[int], int]] = []  # tokens, blocks, sealed
        self.content: dict[int, tuple[int, ...]] = {}

    def write(self, block: int, tokens: list[int]) -> None:
        holders = sum(block in blocks for _, blocks, _ in self.tables)
        assert holders == 0, "a block is written that a sequence holds"
        self.content[block] = tuple(tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def start(self, tokens: list[int]) -> None:
        chain = chain_of(tokens)
        shared = self.allocator.match(chain, (len(tokens) - 1) // BLOCK)
        for position, block in enumerate(shared):
            assert self.content[block] == tuple(tokens[position * BLOCK : (position + 1) * BLOCK])
        missing = self.allocator.blocks_for(len(tokens)) - len(shared)
        assert missing >= 1, "nothing is left to compute"
        if self.allocator.room_after(shared) < missing:
            return
        self.allocator.share(shared)
        blocks = shared + self.allocator.allocate(missing)
        for position in range(len(shared), len(blocks)):
            self.write(blocks[position], tokens[position * BLOCK : (position + 1) * BLOCK])
        for position in range(len(shared), len(chain)):
            self.allocator.seal(blocks[position], chain.key(position))
        self.tables.append((tokens, blocks, len(chain)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        tokens, blocks, sealed = self.tables.pop(index)
        tokens = [*tokens, token]
        if len(tokens) > len(blocks) * BLOCK:
            if not self.allocator.available:
                self.tables.append((tokens[:-1], blocks, sealed))
                return
            blocks = blocks + self.allocator.allocate(1)
        last = len(blocks) - 1
        self.write(blocks[last], tokens[last * BLOCK :])
        if len(tokens) % BLOCK == 0:
            self.allocator.seal(blocks[last], chain_of(tokens).key(last))
            sealed += 1
        self.tables.append((tokens, blocks, sealed))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        _, blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(blocks)

    @invariant()
    def holds(self) -> None:
        self.allocator.check(blocks for _, blocks, _ in self.tables)
        assert self.allocator.used == len({b for _, blocks, _ in self.tables for b in blocks})

    def teardown(self) -> None:
        for _, blocks, _ in self.tables:
            self.allocator.release(blocks)
        self.allocator.check([])
        assert self.allocator.available == self.allocator.num_blocks


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.pytestmark = pytest.mark.timeout(400)
"""A failure is made small before it is shown, and that takes a while."""
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

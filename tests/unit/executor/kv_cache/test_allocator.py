"""The block allocator: reference counts, prefix reuse, eviction, and no leak under any schedule."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.executor.kv_cache.allocator import BlockAllocator, OutOfBlocks
from services.executor.kv_cache.block_pool import BlockPool
from services.executor.kv_cache.offload_tiers import SpillTiers
from services.executor.kv_cache.prefix_index import BlockChain, root_digest, state_keys

ROOT = root_digest("model")
BLOCK = 4


def chain_of(tokens: list[int]) -> BlockChain:
    return BlockChain(array("i", tokens), BLOCK, ROOT)


def fill(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """A table for `tokens`, its full blocks sealed."""
    chain = chain_of(tokens)
    blocks = allocator.allocate(-(-len(tokens) // BLOCK))
    for position in range(len(chain)):
        seal(allocator, blocks, chain, position)
    return blocks


def seal(allocator: BlockAllocator, blocks: list[int], chain: BlockChain, position: int) -> None:
    kept = allocator.allocate_full_blocks(1)[0] if allocator.num_blocks > allocator.num_writable else None
    blocks[position] = allocator.seal(blocks[position], chain.key(position), kept)


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


def keep_state(allocator: BlockAllocator, chain: BlockChain, block: int, parts: int = 2) -> list[int]:
    """The blocks of a snapshot behind the `block`-th of `chain`, cached."""
    keys = state_keys(chain.digest(block), parts)
    blocks = [allocator.seal(allocator.allocate_full_blocks(1)[0], key) for key in keys]
    allocator.release(blocks, wanted=True)
    return blocks


def test_a_beginning_ends_at_the_last_snapshot_that_is_whole() -> None:
    allocator = BlockAllocator(12, BLOCK)
    chain = chain_of(list(range(20)))
    table = fill(allocator, list(range(20)))
    assert allocator.match_state(chain, 4, 2) == ([], [], 4)
    first, last = keep_state(allocator, chain, 1), keep_state(allocator, chain, 3)
    assert allocator.match_state(chain, 4, 2) == (table[:4], last, 4)
    assert allocator.match_state(chain, 3, 2) == (table[:2], first, 3)
    other = chain_of([*range(12), 99, 98, 97, 96])
    assert allocator.match_state(other, 4, 2) == (table[:2], first, 3)
    keep_state(allocator, chain, 2, parts=1)
    assert allocator.match_state(chain, 3, 2) == (table[:2], first, 3), "a part is missing"
    assert allocator.find_state(chain.digest(2), 1)
    assert allocator.find_state(chain.digest(2), 2) == []
    allocator.check([table])


def test_spilled_parts_of_a_snapshot_are_found_where_there_is_room_for_them() -> None:
    allocator = BlockAllocator(6, BLOCK, tiers=SpillTiers(8, 0))
    chain = chain_of(list(range(8)))
    table = fill(allocator, list(range(8)))
    snapshot = keep_state(allocator, chain, 1)
    taken = allocator.allocate(3)  # two empty ones, and a part of the snapshot
    found, parts, _ = allocator.match_state(chain, 2, 2)
    assert (found, parts) == ([], []), "one block can be had, and two parts need one each"
    allocator.release(taken)
    found, parts, _ = allocator.match_state(chain, 2, 2)
    assert found == table
    assert sorted(part < 0 for part in parts) == [False, True]
    assert allocator.find_state(chain.digest(1), 2) == []
    blocks = allocator.take([*found, *parts])
    assert {*snapshot} & {*blocks[2:]}
    for part, block in zip(parts, blocks[2:], strict=True):
        if part < 0:
            allocator.restore(~part, block)
    assert len(allocator.take_copies().restores) == 1
    allocator.release([*blocks, *table])
    allocator.check([])


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
    assert allocator.room_after(blocks) == (2, 2)
    allocator.release(blocks)
    assert allocator.available == 4
    assert allocator.room_after(blocks) == (2, 2)


def test_a_duplicate_of_a_known_block_gives_way_to_it() -> None:
    allocator = BlockAllocator(4, BLOCK)
    [first], [second] = fill(allocator, [1, 2, 3, 4]), allocator.allocate(1)
    assert allocator.seal(second, chain_of([1, 2, 3, 4]).key(0)) == first
    assert allocator.available == 3
    allocator.check([[first], [first]])


def test_full_blocks_are_kept_under_quantized_ids_and_their_writable_ones_are_free() -> None:
    allocator = BlockAllocator(3, BLOCK, num_quantized=2)
    tables = [fill(allocator, [n] * BLOCK) for n in range(2)]
    assert tables == [[3], [4]]
    assert (allocator.available_full_blocks, allocator.available_writable) == (0, 3)
    with pytest.raises(OutOfBlocks):
        allocator.allocate_full_blocks(1)
    [writable] = allocator.allocate(1)
    with pytest.raises(ValueError, match="no quantized block"):
        allocator.seal(writable, chain_of([9] * BLOCK).key(0))
    allocator.release(tables[0])
    [quantized] = allocator.allocate_full_blocks(1)
    assert quantized == 3
    allocator.check([tables[1], [writable], [quantized]])
    assert allocator.seal(writable, chain_of([9] * BLOCK).key(0), quantized) == 3
    allocator.check([tables[1], [3]])


def test_a_duplicate_of_a_known_block_frees_both_of_its_ids() -> None:
    allocator = BlockAllocator(3, BLOCK, num_quantized=3)
    assert fill(allocator, [1] * BLOCK) == fill(allocator, [1] * BLOCK) == [3]
    assert (allocator.available_full_blocks, allocator.available_writable) == (2, 3)
    allocator.check([[3], [3]])


def test_what_is_evicted_is_saved_if_it_may_be_wanted() -> None:
    allocator = BlockAllocator(3, BLOCK, tiers=SpillTiers(2, 2))
    plain, session, preempted = (fill(allocator, [n] * BLOCK) for n in range(3))
    allocator.release(plain)
    allocator.release(session, session="s")
    allocator.release(preempted, wanted=True)
    table = allocator.allocate(3)
    saves = allocator.take_copies().saves
    assert sorted(saves) == [(1, 0), (1, 2), (2, 1), (2, 3)], "to host memory and to disk"
    allocator.release(table)
    chain = chain_of([1] * BLOCK + [9])
    assert allocator.match(chain, 1) == [~0]
    [block] = allocator.take([~0])
    allocator.check([[block]], {0: 1})
    allocator.restore(0, block)
    assert allocator.take_copies().restores == [(0, block)]
    assert allocator.seal(block, chain.key(0)) == block
    assert allocator.match(chain, 1) == [block]
    allocator.check([[block]], {})


def test_of_too_many_saves_the_beginnings_stay() -> None:
    allocator = BlockAllocator(4, BLOCK, tiers=SpillTiers(9, 0), saves_per_step=2)
    blocks = fill(allocator, list(range(16)))
    allocator.release(blocks, session="s")
    allocator.allocate(4)
    assert [block for block, _ in allocator.take_copies().saves] == [blocks[1], blocks[0]]
    assert allocator.match(chain_of(list(range(17))), 4) == []
    allocator.check()


def test_what_is_spilled_again_is_not_written_again() -> None:
    allocator = BlockAllocator(1, BLOCK, tiers=SpillTiers(4, 0))
    chain = chain_of([1] * BLOCK + [9])
    allocator.release(fill(allocator, [1] * BLOCK), session="s")
    allocator.release(allocator.allocate(1))
    [slot] = allocator.match(chain, 1)
    [block] = allocator.take([slot])
    allocator.restore(~slot, block)
    assert len(allocator.take_copies().saves) == 1
    allocator.seal(block, chain.key(0))
    allocator.release([block], session="s")
    allocator.release(allocator.allocate(1))
    assert allocator.take_copies().saves == []
    assert allocator.match(chain, 1) == [slot]


def test_no_more_is_found_than_there_is_room_to_restore() -> None:
    allocator = BlockAllocator(4, BLOCK, tiers=SpillTiers(9, 0))
    tokens = list(range(13))
    allocator.release(fill(allocator, tokens), session="s")
    table = allocator.allocate(4)
    allocator.release(table[:1])
    assert len(allocator.match(chain_of(tokens), 3)) == 1
    allocator.release(table[1:])
    assert len(allocator.match(chain_of(tokens), 3)) == 3


def test_pins_are_evicted_last_and_bounded() -> None:
    allocator = BlockAllocator(4, BLOCK, session_ttl=10)
    mine, other = fill(allocator, list(range(8))), fill(allocator, [7] * 8)
    allocator.release(mine, session="mine", now=0.0)
    allocator.release(other, now=1.0)
    assert set(allocator.allocate(2)) == set(other)
    allocator.release(other)
    more = fill(allocator, list(range(20, 28)))
    allocator.release(more, session="more", now=2.0)
    allocator.check([])
    assert allocator.allocate(1) == [mine[1]], "half of the blocks may be pinned, by the last who came"
    allocator.expire(12.0)
    allocator.check()


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


def test_a_pool_without_blocks_says_so() -> None:
    pool = BlockPool(0, 1, most_pinned=0)
    assert pool.take() == (0, False)
    for unpinned in (False, True):
        with pytest.raises(IndexError, match="no unused block"):
            pool.take(unpinned=unpinned)
    assert not pool.pin_first(0), "none may be pinned"
    assert pool.take(unpinned=True) == (0, True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._writable._empty.append(a._writable._empty[0]),
        lambda a: a._writable._empty.pop(),
        lambda a: a._references.__setitem__(a._writable._empty[0], 1),
        lambda a: a._references.__setitem__(0, -1),
        lambda a: a._writable._cached.__setitem__(a._writable._empty[0], None),
        lambda a: a._writable._pinned.__setitem__(a._writable._empty[0], None),
        lambda a: a._pins.add(a._writable._empty[0], "s", 0.0),
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
        self.tables: list[tuple[list[int], list[int], int]] = []  # tokens, blocks, sealed
        self.content: dict[int, tuple[int, ...]] = {}

    @initialize(quantized=st.sampled_from([0, 6]))
    def build(self, quantized: int) -> None:
        """With quantized blocks: writable ones are the last of each sequence, and what one that starts fills."""
        self.allocator = BlockAllocator(7, BLOCK, num_quantized=quantized)
        self.compresses = quantized > 0

    def seal(self, blocks: list[int], tokens: list[int], position: int) -> None:
        """In a step that has filled the block: where it is compressed, to an id that nobody holds."""
        kept = self.allocator.allocate_full_blocks(1)[0] if self.compresses else None
        if kept is not None:
            self.write(kept, list(self.content[blocks[position]]))
        blocks[position] = self.allocator.seal(blocks[position], chain_of(tokens).key(position), kept)

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
        missing = -(-len(tokens) // BLOCK) - len(shared)
        assert missing >= 1, "nothing is left to compute"
        room, writable = self.allocator.room_after(shared)
        full = len(chain) - len(shared)
        if writable < missing or room < (full if self.compresses else missing):
            return
        self.allocator.share(shared)
        blocks = shared + self.allocator.allocate(missing)
        for position in range(len(shared), len(blocks)):
            self.write(blocks[position], tokens[position * BLOCK : (position + 1) * BLOCK])
        for position in range(len(shared), len(chain)):
            self.seal(blocks, tokens, position)
        self.tables.append((tokens, blocks, len(chain)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        tokens, blocks, sealed = self.tables.pop(index)
        tokens = [*tokens, token]
        longer = len(tokens) > len(blocks) * BLOCK
        filled = len(tokens) % BLOCK == 0
        lacking = (longer and not self.allocator.available_writable) or (
            filled and self.compresses and not self.allocator.available_full_blocks
        )
        if lacking:
            self.tables.append((tokens[:-1], blocks, sealed))
            return
        blocks = blocks + self.allocator.allocate(longer)
        last = len(blocks) - 1
        self.write(blocks[last], tokens[last * BLOCK :])
        if filled:
            self.seal(blocks, tokens, last)
            sealed += 1
        self.tables.append((tokens, blocks, sealed))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        _, blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(blocks)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check(blocks for _, blocks, _ in self.tables)
        assert self.allocator.num_blocks - self.allocator.available == len(
            {b for _, blocks, _ in self.tables for b in blocks}
        )

    def teardown(self) -> None:
        for _, blocks, _ in self.tables:
            self.allocator.release(blocks)
        self.allocator.check([])
        assert self.allocator.available == self.allocator.num_blocks


TestAllocatorMachine = AllocatorMachine.TestCase
# A failure is made small before it is shown, and that takes a while.
TestAllocatorMachine.pytestmark = pytest.mark.timeout(400)
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40)

"""Who owns which KV block. One allocator, in the leader, decides for the whole ring.

Every rank stores its own heads under the same block ids: the shards agree by construction.

    num_blocks
    ├── empty    no content worth keeping          references 0   not in the index
    ├── cached   full, findable, nobody reads it   references 0   in the index     (oldest is evicted first)
    └── used
        ├── private   being filled by one sequence   references 1   not in the index
        └── sealed    full, never written again      references ≥ 1 in the index, or a duplicate of
                                                                    a block that is (references 1)

      empty ──allocate──▶ private ──seal──▶ sealed ──release (last)──▶ cached ──share──▶ sealed
        ▲                    │                 ▲                          │
        └──────release───────┘                 └──────────share───────────┤
        └───────────────────────────evicted by allocate───────────────────┘

Invariant: empty + cached + used = num_blocks, each block in exactly one region; a block with two
references or more is in the index, hence full: nothing that is shared is ever written.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from services.executor.kv_cache.prefix_index import BlockChain, BlockKey, PrefixIndex


class OutOfBlocks(Exception):
    """More blocks were asked for than can be had. The caller makes room and asks again."""


class BlockAllocator:
    """Hands out block ids 0 to `num_blocks` - 1, counts references and remembers full blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex()
        self.releases = 0
        """Calls of `release`: while it stands still, no more blocks can be had than before."""

    @property
    def available(self) -> int:
        """Blocks that can be had at once: empty, or cached and unused."""
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def match(self, chain: BlockChain, limit: int) -> list[int]:
        """The blocks that hold the beginning of `chain`, `limit` at most. Takes no reference.

        A sequence of n tokens passes `(n - 1) // block_size`: its last token must be computed,
        for its logits.
        """
        blocks: list[int] = []
        for position in range(min(limit, len(chain))):
            block = self._index.find(chain.key(position))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def room_after(self, shared: Sequence[int]) -> int:
        """Blocks that can still be had once `shared` (from `match`) have been taken."""
        return self.available - sum(1 for block in shared if self._references[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each of `blocks`, which `match` has found."""
        for block in blocks:
            if block not in self._index:
                raise ValueError(f"block {block} cannot be shared: it is not full")
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` writable blocks with one reference each; evicts the longest unused cached ones.

        Raises `OutOfBlocks` and takes nothing when there are too few.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} KV blocks were asked for and {self.available} can be had")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def seal(self, block: int, key: BlockKey) -> None:
        """`block` is full and computed: it is never written again, and others may find and share it."""
        if self._references[block] != 1:
            raise ValueError(f"block {block} cannot be sealed: it has {self._references[block]} references")
        self._index.put(block, key)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each block of a table.

        From the end, so that the longest prefixes are evicted first and their beginnings last.
        """
        self.releases += 1
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._index:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        block, _ = self._cached.popitem(last=False)
        self._index.remove(block)
        return block

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raises AssertionError where the invariant does not hold. For tests, and for idle moments.

        `tables`: the block tables of all sequences, where the caller can name them.
        """
        self._index.check()
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is in the empty list twice"
        assert not empty & cached, "a block is both empty and cached"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} references"
            unused = block in empty or block in cached
            assert unused == (references == 0), f"block {block} is leaked or in use while free"
            assert references < 2 or block in self._index, f"block {block} is shared while writable"
        assert all(block in self._index for block in cached), "a cached block cannot be found"
        assert not any(block in self._index for block in empty), "an empty block can be found"
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            counted = {block: count for block, count in enumerate(self._references) if count}
            assert held == counted, f"tables hold {dict(held)}, the allocator counts {counted}"

"""Who owns which KV block. One allocator, in the leader, decides for the whole ring.

Every rank stores its own heads under the same block ids: the shards agree by construction.

    ids    0 .......... num_writable | num_writable ............... num_writable + num_quantized
           writable: written to        quantized: full blocks, compressed (none without compression)

    each block is
    ├── unused   empty, cached or pinned (`block_pool.py`)   references 0   cached and pinned: in the index
    └── used
        ├── private   held by one sequence or transfer        references 1   not in the index
        │             writable: being filled; quantized: to be written
        └── sealed    full, never written again               references ≥ 1 in the index

      empty ──allocate, allocate_full_blocks──▶ private ──seal──▶ sealed ──release (last)──▶ cached ──share──▶ sealed
        ▲                                          │                                           │
        └─────────────────release──────────────────┴──────────────evicted──────────────────────┘

Full blocks are kept in one format: quantized where there are quantized ids, else writable. A sequence takes the
quantized id of a block before the step that fills it, and that step writes both: whoever reads the block as an earlier
one reads the quantized id, whoever is in it the writable one (docs/adr/0024). At its seal, when the step is over and
its tokens are known to be right, the writable id is empty at once; where another block holds the same tokens already,
so is the quantized one.

What is evicted and may be wanted again (a session's, or a preempted sequence's) is saved to a spill slot
(`offload_tiers.py`).

Invariant: every block is in exactly one region; one with two references or more is in the index, hence
full: nothing that is shared is ever written. With quantized ids no writable block is in the index.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from services.executor.kv_cache.block_pool import BlockPool, Copies, Pairs, PinnedBlocks, check_regions, check_tables
from services.executor.kv_cache.offload_tiers import SpillTiers
from services.executor.kv_cache.prefix_index import BlockChain, BlockKey, PrefixIndex, is_root, state_keys
from shared.messages.debugging import AllocatorDump, HolderDump

MOST_PINNED = 0.5  # share of a format's blocks that sessions may pin


class OutOfBlocks(Exception):
    """More blocks were asked for than can be had. The caller makes room and asks again."""


class BlockAllocator:
    """Hands out block ids, counts references, remembers full blocks and says where they move."""

    def __init__(
        self,
        num_writable: int,
        block_size: int,
        num_quantized: int = 0,
        tiers: SpillTiers | None = None,
        session_ttl: float = 0.0,
        saves_per_step: int = 64,
    ) -> None:
        """`session_ttl` in seconds; `saves_per_step`: of more evicted blocks the last ones are saved."""
        if num_writable < 1 or block_size < 1 or num_quantized < 0:
            raise ValueError(f"a KV cache of {num_writable} blocks of {block_size} tokens holds nothing")
        self.num_writable = num_writable
        self.num_blocks = num_writable + num_quantized
        self.block_size = block_size
        self._references = [0] * self.num_blocks
        self._writable = BlockPool(0, num_writable, int(num_writable * MOST_PINNED))
        self._quantized = BlockPool(num_writable, num_quantized, int(num_quantized * MOST_PINNED))
        self._compresses = num_quantized > 0
        self._full_blocks = self._quantized if num_quantized else self._writable  # full blocks
        self._index = PrefixIndex()
        self._pins = PinnedBlocks(session_ttl)
        self._tiers = tiers if tiers is not None else SpillTiers(0, 0)
        self._saves_per_step = saves_per_step * self._tiers.count
        self._wanted: set[int] = set()
        # What the next plan copies: by slot, the oldest first, the block that is saved there and what it holds; and
        # (slot, block) of what is restored, whose slots are locked until then.
        self._saves: dict[int, tuple[int, BlockKey]] = {}
        self._restores: Pairs = []
        self.room_version = 0  # changes whenever there may be more room than before

    # --- room ------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that can be had at once: unused ones, writable and quantized."""
        return self._writable.available + self._quantized.available

    @property
    def available_writable(self) -> int:
        """Writable blocks that can be had at once."""
        return self._writable.available

    @property
    def available_full_blocks(self) -> int:
        """Blocks for full ones that can be had at once: quantized ones; the writable ones where there are none."""
        return self._full_blocks.available

    def room_after(self, found: Sequence[int]) -> tuple[int, int]:
        """(blocks for full ones, writable blocks) that can still be had once the cached ones of `found` have been
        taken."""
        unused = sum(1 for block in found if block >= 0 and self._references[block] == 0)
        full = self._full_blocks.available - unused
        return full, self._writable.available if self._full_blocks is self._quantized else full

    # --- known beginnings ------------------------------------------------------------------------

    def match(self, chain: BlockChain, limit: int) -> list[int]:
        """Where the beginning of `chain` is, `limit` blocks at most: a block id, or below 0, as ~slot, a
        spill slot. Takes nothing; no more is found than there is room to restore.

        A sequence of n tokens passes `(n - 1) // block_size`: its last token must be computed,
        for its logits.
        """
        found: list[int] = []
        room = self._full_blocks.available
        for position in range(min(limit, len(chain))):
            place = self._find(chain, position)
            if place is None:
                break
            if self._must_be_taken(place):
                room -= 1
                if room < 0:
                    break
            found.append(place)
        return found

    def match_state(self, chain: BlockChain, limit: int, parts: int) -> tuple[list[int], list[int], int]:
        """As `match`, for a model that keeps recurrent state, whose snapshots take `parts` blocks: the longest
        beginning that has a snapshot behind it, where that is, and the number of blocks that `match` finds at most."""
        places: list[int] = []
        room = [self._full_blocks.available]
        for position in range(min(limit, len(chain))):
            place = self._find(chain, position)
            if place is None:
                break
            places.append(place)
            room.append(room[-1] - self._must_be_taken(place))
        for end in range(len(places), 0, -1):
            snapshot = self._find_state(chain.digest(end - 1), parts)
            if snapshot and room[end] >= sum(map(self._must_be_taken, snapshot)):
                return places[:end], snapshot, len(places)
        return [], [], len(places)

    def _find_state(self, parent: bytes, parts: int) -> list[int]:
        """Where the snapshot behind the block with that digest is; empty where it is not whole."""
        places = []
        for key in state_keys(parent, parts):
            place = self._place_of(key)
            if place is None:
                return []
            places.append(place)
        return places

    def find_state(self, parent: bytes, parts: int) -> list[int]:
        """The blocks of that snapshot; empty where one is missing or spilled."""
        places = self._find_state(parent, parts)
        return places if min(places, default=-1) >= 0 else []

    def _must_be_taken(self, place: int) -> bool:
        """Whether it takes an unused block to have what is there."""
        return place < 0 or self._references[place] == 0

    def find(self, chain: BlockChain, position: int) -> int | None:
        """The block that holds what the `position`-th of `chain` will; spilled ones do not count."""
        return self._index.find(chain.key(position)) if self._index.knows(chain.digest(position)) else None

    def _find(self, chain: BlockChain, position: int) -> int | None:
        digest = chain.digest(position)
        return self._place_of(chain.key(position)) if self.knows(digest) else None

    def _place_of(self, key: BlockKey) -> int | None:
        block = self._index.find(key)
        if block is not None or not self._tiers.count:
            return block
        slot = self._tiers.find(key)
        return None if slot is None else ~slot

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each of `blocks`, which are in the index."""
        for block in blocks:
            if block not in self._index.blocks:
                raise ValueError(f"block {block} cannot be shared: it is not full")
            if self._references[block] == 0:
                self._pool(block).reuse(block)
                self._pins.remove(block)
            self._references[block] += 1

    def take(self, found: Sequence[int]) -> list[int]:
        """The blocks of `found` (from `match`): cached ones are shared, and for each spilled one there is
        a block to restore it to, its slot locked until `restore` or `give_up`."""
        self.share(place for place in found if place >= 0)
        for place in found:
            if place < 0:
                self._tiers.of(~place).lock(~place)
        return [place if place >= 0 else self._take(self._full_blocks) for place in found]

    def restore(self, slot: int, block: int) -> None:
        """The next plan brings the bytes in `slot` to `block`, both from `take`."""
        self._restores.append((slot, block))

    def give_up(self, slot: int) -> None:
        """What `take` has locked is not going to be restored."""
        self._tiers.of(slot).unlock(slot)

    def lost(self, slot: int, key: BlockKey) -> None:
        """Some rank cannot read what it has of `key` in `slot`."""
        self._tiers.of(slot).forget(slot, key)

    # --- life of a block -------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` writable blocks with one reference each; evicts the longest unused cached ones.

        Raises `OutOfBlocks` and takes nothing when there are too few.
        """
        return self._take_some(self._writable, count)

    def allocate_full_blocks(self, count: int) -> list[int]:
        """As `allocate`, of blocks for full ones."""
        return self._take_some(self._full_blocks, count)

    def seal(self, block: int, key: BlockKey, quantized: int | None = None) -> int:
        """`block` is full and computed: it is never written again, and others may find and share it. `quantized`: where
        the step that has filled it has put it too, from `allocate_full_blocks`; None: it stays where it is.

        Returns the block that holds its content from now on, which takes its place in the table.
        """
        references, full = self._references, self._index.blocks
        for private in (block,) if quantized is None else (block, quantized):
            if references[private] != 1 or private in full:
                raise ValueError(f"block {private} cannot be sealed: it has {references[private]} references")
        if quantized is not None:
            self._drop(block)
            block = quantized
        elif (block >= self.num_writable) is not self._compresses:
            raise ValueError(f"block {block} cannot be sealed: no quantized block was written with it")
        known = self._index.hold(block, key)
        if known != block:
            self.share([known])
            self._drop(block)
        return known

    def release(
        self, blocks: Sequence[int], session: str = "", now: float = 0.0, wanted: bool = False, keep: float = 0.0
    ) -> None:
        """Gives back one reference to each block of a table.

        From the end, so that the longest prefixes are evicted first and their beginnings last. What is
        then unused stays pinned for `session`, for `keep` seconds at least (negative: not at all); `wanted`
        blocks are worth saving without one.
        """
        self.room_version += 1
        pinned = bool(session) and self._pins.ttl > 0 and keep >= 0
        references, full = self._references, self._index.blocks
        for block in reversed(blocks):
            if references[block] < 1:
                raise ValueError(f"block {block} was released twice")
            if references[block] > 1:
                references[block] -= 1
            elif block not in full:
                self._drop(block)
            else:
                references[block] = 0
                if session or wanted:
                    self._wanted.add(block)
                if pinned:
                    self._pin(block, session, now, keep)
                else:
                    (self._writable if block < self.num_writable else self._quantized).put_cached(block)

    def expire(self, now: float) -> None:
        """Takes the pins from sessions whose time is over."""
        for block in reversed(self._pins.expire(now)):
            self._pool(block).expire(block)

    # --- to and from other rings (`services/executor/kv_transfer`) ----------------------------------

    def sessions(self) -> list[tuple[str, float]]:
        """The sessions that blocks are kept for, and when they were used, the last used first."""
        return self._pins.newest_first()

    def blocks_of(self, session: str, root: bytes) -> list[int]:
        """What is kept for `session`, beginnings first, with all that these consist of (`PrefixIndex.chains`)."""
        return self._index.chains(self._pins.blocks(session), root)

    def key_of(self, block: int) -> BlockKey:
        """What `block`, which is in the index, holds."""
        return self._index.key(block)

    def knows(self, digest: bytes) -> bool:
        """Whether the block with that digest is in the cache, or was spilled."""
        return self._index.knows(digest) or (self._tiers.count > 0 and self._tiers.knows(digest))

    @property
    def receivable(self) -> int:
        """Blocks that may be taken over from another ring without one being lost that is kept for a session."""
        return max(0, min(self._full_blocks.unpinned, self._full_blocks.pins_left)) if self._pins.ttl > 0 else 0

    def reserve(self, count: int) -> list[int]:
        """`count` blocks, at most `receivable`, to be `adopt`ed or `unreserve`d."""
        return [self._take(self._full_blocks, unpinned=True) for _ in range(count)]

    def unreserve(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._drop(block)

    def adopt(self, block: int, key: BlockKey, root: bytes, session: str, last_used: float) -> bool:
        """A reserved block holds `key` by now. It is kept for `session` as the longest unused; False, and given
        back, where somebody else has computed it meanwhile or its beginning is not there any more."""
        if self._index.knows(key.digest) or not (is_root(key.parent, root) or self.knows(key.parent)):
            self._drop(block)
            return False
        self._index.put(block, key)
        self._references[block] = 0
        self._wanted.add(block)
        if self._full_blocks.pin_first(block):
            self._pins.add_older(block, session, last_used)
        self.room_version += 1
        return True

    def sort_sessions(self) -> None:
        """After `adopt`: the longest unused sessions come first again."""
        self._pins.sort()

    def take_copies(self) -> Copies:
        for slot, _ in self._restores:
            self._tiers.of(slot).unlock(slot)
        saves = [(block, slot) for slot, (block, _) in self._saves.items()]
        outlives = bool(self._saves) and self._tiers.disk.counts[0] > 0
        copies = Copies(saves, self._restores, [key for _, key in self._saves.values()] if outlives else [])
        self._saves, self._restores = {}, []
        return copies

    # --- inside ----------------------------------------------------------------------------------

    def _pool(self, block: int) -> BlockPool:
        return self._writable if block < self.num_writable else self._quantized

    def _drop(self, block: int) -> None:
        """The last reference to what nobody will look for."""
        self._references[block] = 0
        self._pool(block).put_empty(block)
        self.room_version += 1

    def _pin(self, block: int, session: str, now: float, keep: float) -> None:
        self._pins.add(block, session, now, keep)
        unpinned = self._pool(block).pin(block)
        if unpinned is not None:
            self._pins.remove(unpinned)

    def _take_some(self, pool: BlockPool, count: int) -> list[int]:
        if count > pool.available:
            raise OutOfBlocks(f"{count} KV blocks were asked for and {pool.available} can be had")
        blocks = pool.take_empty(count)
        for block in blocks:
            self._references[block] = 1
        while len(blocks) < count:
            blocks.append(self._take(pool))
        return blocks

    def _take(self, pool: BlockPool, *, unpinned: bool = False) -> int:
        block, evicted = pool.take(unpinned=unpinned)
        if evicted:
            self._evict(block)
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        key = self._index.remove(block)
        self._pins.remove(block)
        wanted = block in self._wanted
        self._wanted.discard(block)
        if wanted:
            for slot in self._tiers.put(key):
                self._saves.pop(slot, None)  # it was to be written already, and has been given away since
                self._saves[slot] = block, key
            self._drop_saves()

    def _drop_saves(self) -> None:
        """Keeps the plan's saves within their bound. The oldest go: the ends of what was evicted, without
        which its beginning is still of use."""
        excess = len(self._saves) - self._saves_per_step
        for slot in list(islice(self._saves, max(0, excess))):
            tier = self._tiers.of(slot)
            if slot not in tier.locks:
                del self._saves[slot]
                tier.forget(slot)

    # --- checks ----------------------------------------------------------------------------------

    def census(self) -> AllocatorDump:
        """How many blocks are in which state; of their holders, sessions alone."""
        used = [block for block, references in enumerate(self._references) if references]
        writable = sum(1 for block in used if block < self.num_writable)
        sessions = [HolderDump("session", *of) for of in self._pins.blocks_by_session().items()]
        (host_slots, host_used), (disk_slots, disk_used) = self._tiers.host.counts, self._tiers.disk.counts
        return AllocatorDump(
            block_size=self.block_size,
            writable=self._writable.counts(writable),
            quantized=self._quantized.counts(len(used) - writable),
            private=sum(1 for block in used if block not in self._index),
            shared=sum(1 for block in used if self._references[block] > 1),
            promised=0,
            reserve=0,
            host_slots=host_slots,
            host_used=host_used,
            disk_slots=disk_slots,
            disk_used=disk_used,
            sessions=len(sessions),
            holders=sessions,
            invariants="",
            snapshots=self._index.snapshots,
        )

    def check(self, tables: Iterable[Sequence[int]] | None = None, locked: dict[int, int] | None = None) -> None:
        """Raises AssertionError where the invariant does not hold. For tests, and for idle moments.

        `tables`: the block tables of all sequences, and `locked` the locks that they hold on spill slots,
        where the caller can name them.
        """
        self._index.check()
        empty, cached, pinned = (h | c for h, c in zip(self._writable.unused(), self._quantized.unused(), strict=True))
        self._pins.check(pinned)
        check_regions(self._references, self._index, empty, cached, pinned)
        writable_full = self._full_blocks is self._quantized and any(
            block in self._index for block in range(self.num_writable)
        )
        assert not writable_full, "a full block is kept as it was written"
        self._tiers.check(
            None if locked is None else dict(Counter(locked) + Counter(slot for slot, _ in self._restores))
        )
        if tables is not None:
            check_tables(self._references, tables)

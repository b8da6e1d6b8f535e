"""Blocks of one format (writable or quantized): what is handed out next, what is evicted for it, and what the ranks
must copy.

empty     no content worth keeping                handed out first
cached    full and findable, longest unused first
pinned    cached, and kept for a session          handed out last: a pin delays eviction, and never
                                                  keeps a block from whoever needs one

Copies are decided by the leader between two plans, executed by every rank in this order:

    1. saves         block ──▶ spill slot     what is evicted, before its id is written again
    2. state saves   state slot ──▶ blocks    snapshots of recurrent state (`scheduler/state_slots.py`)
    3. adoptions     landing slot ──▶ block   what another ring has given (`kv_transfer/exchange.py`)
    4. restores      spill slot ──▶ block     what the step is going to read
    5. state loads   blocks ──▶ state slot    snapshots that sequences begin with
    6. the forward pass, which in each layer writes writable blocks, compresses those that it fills, and attends

Source of a save is only what earlier plans have written; so the order makes it safe to hand an id or a slot
out again in the very plan that saves what it held.

`PinnedBlocks`: which blocks are pinned for which session. A session is pinned by use: each of its turns starts its
time-to-live again. When it runs out, its blocks are cached like everybody's.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from services.executor.kv_cache.prefix_index import PrefixIndex
from shared.messages.debugging import PoolDump


class _Session:
    def __init__(self) -> None:
        self.last_used = self.keep_until = 0.0
        self.blocks: dict[int, None] = {}


class PinnedBlocks:
    """Pinned blocks by session. No clock: time comes in as an argument.

    Invariant: a block is kept for one session at most; a session without blocks is not remembered.
    """

    def __init__(self, ttl: float) -> None:
        """`ttl`: seconds that a session stays pinned after its last use; 0: not at all."""
        self.ttl = ttl
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._owners: dict[int, str] = {}

    def add(self, block: int, session: str, now: float, keep: float = 0.0) -> None:
        """`block` is kept for `session`, which is used `now`; for `keep` seconds at least."""
        entry = self._add(block, session)
        entry.last_used, entry.keep_until = now, max(entry.keep_until, now + keep)
        self._sessions.move_to_end(session)

    def add_older(self, block: int, session: str, last_used: float) -> None:
        """As `add`, for what was used at `last_used` in another ring. `sort` must follow."""
        entry = self._add(block, session)
        entry.last_used = max(entry.last_used, last_used)

    def _add(self, block: int, session: str) -> _Session:
        entry = self._sessions.setdefault(session, _Session())
        entry.blocks[block] = None
        self._owners[block] = session
        return entry

    def sort(self) -> None:
        """The longest unused sessions come first again."""
        self._sessions = OrderedDict(sorted(self._sessions.items(), key=lambda item: item[1].last_used))

    def newest_first(self) -> list[tuple[str, float]]:
        return [(session, entry.last_used) for session, entry in reversed(self._sessions.items())]

    def blocks(self, session: str) -> list[int]:
        entry = self._sessions.get(session)
        return [] if entry is None else list(entry.blocks)

    def remove(self, block: int) -> None:
        """`block` is kept for nobody any more; one that was not is ignored."""
        session = self._owners.pop(block, None)
        if session is None:
            return
        blocks = self._sessions[session].blocks
        del blocks[block]
        if not blocks:
            del self._sessions[session]

    def expire(self, now: float) -> list[int]:
        """The blocks of sessions that have not been used for `ttl` seconds, nor are to be kept for longer, in the order
        in which they came; the sessions are forgotten."""
        blocks: list[int] = []
        over: list[str] = []
        for session, entry in self._sessions.items():
            if entry.last_used + self.ttl > now:
                break
            if entry.keep_until <= now:
                over.append(session)
        for session in over:
            entry = self._sessions.pop(session)
            blocks += entry.blocks
            for block in entry.blocks:
                del self._owners[block]
        return blocks

    def blocks_by_session(self) -> dict[str, int]:
        return {session: len(entry.blocks) for session, entry in self._sessions.items()}

    def __contains__(self, block: int) -> bool:
        return block in self._owners

    def check(self, pinned: set[int]) -> None:
        """Raises AssertionError where the invariant does not hold, or `pinned` are not these blocks."""
        held = [block for entry in self._sessions.values() for block in entry.blocks]
        assert len(held) == len(set(held)), "a block is kept for two sessions"
        assert set(held) == set(self._owners) == pinned, "pins and pinned blocks differ"
        assert all(entry.blocks for entry in self._sessions.values()), "a session without blocks is kept"


class BlockPool:
    """Unused blocks among the ids [first, first + size). Which blocks are in use is the allocator's to know."""

    def __init__(self, first: int, size: int, most_pinned: int) -> None:
        """`most_pinned`: blocks that pins may keep at once; the longest unused give way to newer ones."""
        self.first = first
        self.size = size
        self._most_pinned = most_pinned
        self._empty = list(range(first + size - 1, first - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._cached) + len(self._pinned)

    def take(self, *, unpinned: bool = False) -> tuple[int, bool]:
        """(a block, whether it had to be evicted); `unpinned`: what is kept for sessions is left alone. Raises
        `IndexError` when there is none."""
        if self._empty:
            return self._empty.pop(), False
        held = self._cached if self._cached or unpinned else self._pinned
        if not held:
            raise IndexError("the pool has no unused block")
        return held.popitem(last=False)[0], True

    def take_empty(self, most: int) -> list[int]:
        """As many as `take` would give without an eviction, `most` of them."""
        empty = self._empty
        left = max(0, len(empty) - most)
        taken = empty[left:]
        taken.reverse()
        del empty[left:]
        return taken

    @property
    def pins_left(self) -> int:
        """Blocks that may be pinned before the longest unused must give way."""
        return self._most_pinned - len(self._pinned)

    @property
    def unpinned(self) -> int:
        """Blocks that are not kept for a session."""
        return len(self._empty) + len(self._cached)

    def put_empty(self, block: int) -> None:
        """`block` is unused, and what it holds is worth nothing."""
        self._empty.append(block)

    def put_cached(self, block: int) -> None:
        """`block` is unused, and may be found again."""
        self._cached[block] = None

    def pin(self, block: int) -> int | None:
        """As `put_cached`, for a session. Returns the block that has lost its pin for this one."""
        self._pinned[block] = None
        if len(self._pinned) <= self._most_pinned:
            return None
        oldest, _ = self._pinned.popitem(last=False)
        self._cached[oldest] = None
        return oldest

    def pin_first(self, block: int) -> bool:
        """As `pin`, but as the longest unused of all; False, and cached so, where no more may be pinned."""
        if self.pins_left <= 0:
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)
            return False
        self._pinned[block] = None
        self._pinned.move_to_end(block, last=False)
        return True

    def expire(self, block: int) -> None:
        """A pinned block is cached like others from now on, as the longest unused: its session has not come."""
        del self._pinned[block]
        self._cached[block] = None
        self._cached.move_to_end(block, last=False)

    def reuse(self, block: int) -> None:
        """A cached block is in use again."""
        if block in self._cached:
            del self._cached[block]
        else:
            del self._pinned[block]

    def counts(self, used: int) -> PoolDump:
        """`used`: blocks in use, which the allocator knows."""
        return PoolDump(self.size, len(self._empty), len(self._cached), len(self._pinned), used)

    def unused(self) -> tuple[set[int], set[int], set[int]]:
        """(empty, cached, pinned). Raises AssertionError where a block is in two of them. For checks."""
        empty, cached, pinned = set(self._empty), set(self._cached), set(self._pinned)
        assert len(empty) == len(self._empty), "a block is in the empty list twice"
        assert not empty & cached | empty & pinned | cached & pinned, "a block is unused in two ways"
        assert all(self.first <= b < self.first + self.size for b in empty | cached | pinned), "a foreign block"
        assert len(pinned) <= self._most_pinned, "too many blocks are pinned"
        return empty, cached, pinned


Pairs = list[tuple[int, int]]


class Copies(NamedTuple):
    """(from, to) pairs for the ranks, in the order of execution."""

    saves: Pairs
    restores: Pairs
    # What each of `saves` holds (`BlockKey`), where there are slots on disk.
    keys: list[tuple[bytes, bytes, bytes]]


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

"""Where evicted blocks are kept: who is in which slot of host memory and disk.

The leader alone decides, for all ranks: a slot's number means the same block on each of them, and every
rank keeps its own bytes of it (`offload.py`). A block that is spilled is written to both tiers, to disk
behind the step's back: so nothing is ever moved from host memory to disk, and either tier just forgets
its longest unused slot when it needs one.

    slots    0 ........ num_host | num_host ........ num_host + num_disk
             host memory           disk

    slot     free ──put──▶ held ──put of another block, when longest unused──▶ held
               ▲            │ ▲
               └──forget────┘ └─lock / unlock: a slot that is going to be read is not given away
"""

from collections import OrderedDict
from collections.abc import Iterable

from services.executor.kv_cache.prefix_index import BlockKey, PrefixIndex


class SpillTier:
    """The slots [first, first + size) of one tier.

    Invariant: each slot is free, held and unlocked (in order of use), or locked; a digest is in one slot
    at most.
    """

    def __init__(self, first: int, size: int) -> None:
        self._first = first
        self._size = size
        self._free = list(range(first + size - 1, first - 1, -1))
        self._held = PrefixIndex()
        self._order: OrderedDict[int, None] = OrderedDict()
        self.locks: dict[int, int] = {}  # of slots, how many
        self.find = self._held.find  # the slot that holds a key
        self.knows = self._held.knows

    def put(self, key: BlockKey) -> int | None:
        """The slot to write `key`'s bytes to; None when it is held already, or no slot can be had."""
        if self.knows(key.digest):
            known = self.find(key)
            if known is not None and known not in self.locks:
                self._order.move_to_end(known)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._order:
            slot, _ = self._order.popitem(last=False)
            self._held.remove(slot)
        else:
            return None
        self._held.put(slot, key)
        self._order[slot] = None
        return slot

    def recover(self, blocks: Iterable[tuple[int, BlockKey]]) -> None:
        """Free slots hold blocks of an earlier life of the ring, (slot, key) each, the longest unused first."""
        for slot, key in blocks:
            if self._held.put(slot, key):
                self._order[slot] = None
        self._free = [slot for slot in self._free if slot not in self._held]

    def lock(self, slot: int) -> None:
        """`slot` is going to be read: it stays as it is until every lock is gone."""
        self._order.pop(slot, None)
        self.locks[slot] = self.locks.get(slot, 0) + 1

    def unlock(self, slot: int) -> None:
        """Takes one lock back."""
        self.locks[slot] -= 1
        if self.locks[slot]:
            return
        del self.locks[slot]
        if slot in self._held:
            self._order[slot] = None
        else:
            self._free.append(slot)

    def forget(self, slot: int, key: BlockKey | None = None) -> None:
        """The bytes in `slot` are lost. With `key`, only where they are that block's."""
        if slot not in self._held or key not in (None, self._held.key(slot)):
            return
        self._held.remove(slot)
        if slot not in self.locks:
            del self._order[slot]
            self._free.append(slot)

    @property
    def counts(self) -> tuple[int, int]:
        """(slots, those that hold a block)."""
        return self._size, len(self._held)

    def check(self) -> None:
        """Raises AssertionError where the invariant does not hold."""
        free, order, locked = set(self._free), set(self._order), set(self.locks)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & order | free & locked | order & locked, "a slot is in two states"
        assert free | order | locked == set(range(self._first, self._first + self._size)), "a slot is leaked"
        self._held.check()
        held = {slot for slot in order | free | locked if slot in self._held}
        assert order <= held <= order | locked, "a free slot holds a block, or a held one none"


class SpillTiers:
    def __init__(self, num_host: int, num_disk: int) -> None:
        self._num_host = num_host
        self.host = SpillTier(0, num_host)
        self.disk = SpillTier(num_host, num_disk)
        self._tiers = [tier for tier, size in ((self.host, num_host), (self.disk, num_disk)) if size]

    @property
    def count(self) -> int:
        return len(self._tiers)

    def find(self, key: BlockKey) -> int | None:
        """The slot to read `key` from."""
        for tier in self._tiers:
            slot = tier.find(key)
            if slot is not None:
                return slot
        return None

    def knows(self, digest: bytes) -> bool:
        """Whether `find` may find it: a look without the tokens."""
        return any(tier.knows(digest) for tier in self._tiers)

    def put(self, key: BlockKey) -> list[int]:
        """The slots to write `key` to: none where it is held already."""
        return [slot for tier in self._tiers if (slot := tier.put(key)) is not None]

    def recover(self, blocks: Iterable[tuple[int, BlockKey]]) -> int:
        """Slots on disk hold blocks of an earlier life of the ring, (slot, key) each, the longest unused first. Returns
        how many can be found. To be called before anything is put."""
        self.disk.recover(blocks)
        return self.disk.counts[1]

    def of(self, slot: int) -> SpillTier:
        """The tier that has `slot`."""
        return self.disk if self.on_disk(slot) else self.host

    def on_disk(self, slot: int) -> bool:
        return slot >= self._num_host

    def check(self, locked: dict[int, int] | None = None) -> None:
        """Raises AssertionError where an invariant does not hold; `locked`: locks that there must be."""
        self.host.check()
        self.disk.check()
        if locked is not None:
            held = {**self.host.locks, **self.disk.locks}
            assert held == locked, f"locks {held} are held, {locked} are owed"

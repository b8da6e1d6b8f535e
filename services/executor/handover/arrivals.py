"""What a ring takes over from one that leaves: from the offer to the prefix index.

    offered ──▶ reserved ──▶ landed ──▶ adopted ──▶ findable           one batch at a time
       │            │      on every rank   in a plan      ▲
       └ not wanted └──────────┴──── dropped: nothing but cache is lost

A rank keeps what it has received in the batch's landing slots, in its own memory; slot i holds the i-th wanted
block. Ranks receive in order, so what all have received is a beginning of the batch. Plans then carry
(landing slot, block id) pairs, a bounded number per step, and a block can be found once every rank has been sent
the plan that brings its bytes: ranks execute plans in order, hence before any step that reads it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from services.executor.kv_cache.allocator import BlockAllocator
from services.executor.kv_cache.prefix_index import BlockKey, block_digest, is_root


class Offered(NamedTuple):
    """A block that another ring has."""

    parent: bytes
    """Digest of the block before it, or the root of its chain."""
    tokens: bytes
    session: str
    last_used: float
    """Of the session, by this ring's steady clock."""


class _Arrival(NamedTuple):
    block: int
    key: BlockKey
    session: str
    last_used: float


class Arrivals:
    """The batch that is being received. No clock, no I/O.

    Invariant: each reserved block is in exactly one of waiting, landed and adopted.
    """

    def __init__(self, allocator: BlockAllocator, root: bytes, most: int, per_plan: int) -> None:
        """`most`: landing slots, hence blocks of a batch; `per_plan`: blocks that one plan brings at most."""
        self._allocator = allocator
        self._root = root
        self.most = most
        self._per_plan = per_plan
        self._offered: list[bytes] = []
        self._wanted: list[_Arrival] = []
        self._next = 0
        """The first of `_wanted` that no plan has brought yet."""
        self._landed = 0
        self._adopted: list[_Arrival] = []
        """In the plan under way."""
        self.received = 0
        """Blocks taken over in all."""

    def begin(self, offered: Sequence[Offered], room: int) -> list[int]:
        """Reserves blocks, `room` at most, for what is worth having: what is not here yet, and of which the whole
        beginning is here or wanted too. Returns the indices of what is wanted, ascending."""
        self.end()
        self._offered = []
        room = min(room, self.most, self._allocator.receivable)
        wanted: list[tuple[int, BlockKey]] = []
        coming: set[bytes] = set()
        for index, one in enumerate(offered):
            digest = block_digest(one.parent, one.tokens)
            self._offered.append(digest)
            if self._allocator.knows(digest) or digest in coming:
                continue
            if len(wanted) < room and self._is_whole(one.parent, coming):
                wanted.append((index, BlockKey(digest, one.parent, one.tokens)))
                coming.add(digest)
        blocks = self._allocator.reserve(len(wanted))
        self._wanted = [
            _Arrival(block, key, offered[index].session, offered[index].last_used)
            for block, (index, key) in zip(blocks, wanted, strict=True)
        ]
        return [index for index, _ in wanted]

    def _is_whole(self, parent: bytes, coming: AbstractSet[bytes]) -> bool:
        """Whether the beginning that ends with `parent` is here, or among what is `coming`."""
        return parent in coming or self._allocator.knows(parent) or is_root(parent, self._root)

    def landed(self, count: int) -> None:
        """Every rank has received the first `count` of what is wanted."""
        self._landed = max(self._landed, min(count, len(self._wanted)))

    def take(self) -> list[tuple[int, int]]:
        """(landing slot, block id) pairs that the plan about to be sent must carry."""
        stop = min(self._landed, self._next + self._per_plan)
        self._adopted = self._wanted[self._next : stop]
        pairs = [(slot, self._wanted[slot].block) for slot in range(self._next, stop)]
        self._next = stop
        return pairs

    def close(self) -> None:
        """The plan that `take` was called for has been sent to every rank."""
        if not self._adopted:
            return
        for block, key, session, last_used in self._adopted:
            self.received += self._allocator.adopt(block, key, self._root, session, last_used)
        self._allocator.sort_sessions()
        self._adopted = []

    def end(self) -> None:
        """Nothing more of the batch comes. What a plan under way brings is still adopted."""
        self._allocator.unreserve(arrival.block for arrival in self._wanted[self._next :])
        self._wanted, self._next, self._landed = [], 0, 0

    def held(self) -> bytes:
        """For each block of the batch that was offered: 1 where it can be found here, else 0."""
        return bytes(self._allocator.knows(digest) for digest in self._offered)

    @property
    def ready(self) -> bool:
        """Whether a plan should bring something."""
        return self._next < self._landed

    @property
    def missing(self) -> bool:
        """Whether something that is wanted has not landed."""
        return self._landed < len(self._wanted)

    @property
    def adopting(self) -> bool:
        """Whether something that has landed is not to be found yet."""
        return self.ready or bool(self._adopted)

    @property
    def reserved(self) -> list[int]:
        """Blocks that are neither free nor to be found yet, as a table."""
        return [arrival.block for arrival in (*self._wanted[self._next :], *self._adopted)]

"""Both directions of KV transfer, as the batcher sees them: what the next plan must carry. No clock, no I/O.

`Arrivals`: what a ring takes over from one that leaves, from the offer to the prefix index.

    offered ──▶ reserved ──▶ landed ──▶ adopted ──▶ findable           one batch at a time
       │            │      on every rank   in a plan      ▲
       └ not wanted └──────────┴──── dropped: nothing but cache is lost

A rank keeps what it has received in the batch's landing slots, in its own memory; slot i holds the i-th wanted
block. Ranks receive in order, so what all have received is a beginning of the batch. Plans then carry
(landing slot, block id) pairs, a bounded number per step, and a block can be found once every rank has been sent
the plan that brings its bytes: ranks execute plans in order, hence before any step that reads it.

`Departures`: what a leaving ring has to give, the full blocks of its sessions, in batches, the last used sessions
first.

    sessions, last used first     s3 [b0 b1 b2]   s2 [b0 b4]   s1 [b0 b5 b6]
    batches for one peer              b0 b1 b2 │ b4 b5 │ b6            a block after its whole beginning, and once

While a batch is on its way its blocks are shared, so that no step writes to them: the ring may go on computing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from services.executor.core.step_plan import to_bytes
from services.executor.kv_cache.allocator import BlockAllocator
from services.executor.kv_cache.prefix_index import BlockKey, block_digest, is_root

MOST_BLOCKS = 256  # of one batch


class Exchange:
    """What a ring gives to others (`departures`) and takes from them (`arrivals`)."""

    def __init__(self, allocator: BlockAllocator, root: bytes, copies_per_step: int) -> None:
        # A quarter of what a step may restore: the peer's own sequences go on meanwhile.
        self.arrivals = Arrivals(allocator, root, MOST_BLOCKS, max(1, copies_per_step // 4))
        self.departures = Departures(allocator, root)
        self._commands: deque[bytes] = deque()

    def command(self, command: bytes) -> None:
        """One of the next plans carries it to every rank; commands keep their order."""
        self._commands.append(command)

    @property
    def ready(self) -> bool:
        """Whether a plan should be sent, be there something to compute or not."""
        return bool(self._commands) or self.arrivals.ready

    @property
    def quiet(self) -> bool:
        """Whether neither the plan under way nor the next one has to do with it."""
        return not (self._commands or self.arrivals.adopting)

    def take_fields(self) -> dict[str, bytes]:
        """Fields of the `StepPlan` that is about to be sent."""
        pairs = self.arrivals.take()
        return {"adoptions": to_bytes(pairs), "handover": self._commands.popleft() if self._commands else b""}

    def make_way(self) -> bool:
        """Gives up what is being received, for sequences that need the room; whether there was anything. What is
        being sent ranks still read: it is asked for, and comes back soon."""
        self.departures.crowded = bool(self.departures.held)
        if not self.arrivals.reserved:
            return False
        self.arrivals.end()
        return True

    @property
    def held(self) -> list[list[int]]:
        """Blocks in use for the exchange, as tables. For checks."""
        return [self.departures.held, self.arrivals.reserved]


class Offered(NamedTuple):
    parent: bytes  # digest of the block before it, or the root of its chain
    tokens: bytes
    session: str
    last_used: float  # of the session, by this ring's steady clock


class SessionBlock(NamedTuple):
    """One block on its way from a ring to another."""

    block: int
    key: BlockKey
    session: str
    last_used: float  # of the session, by the steady clock of the ring that this is


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
        self._wanted: list[SessionBlock] = []
        self._next = 0  # the first of `_wanted` that no plan has brought yet
        self._landed = 0
        self._adopted: list[SessionBlock] = []  # in the plan under way
        self.received = 0  # blocks taken over in all

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
            SessionBlock(block, key, offered[index].session, offered[index].last_used)
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


class Departures:
    """Chooses what goes next. No clock, no I/O."""

    def __init__(self, allocator: BlockAllocator, root: bytes) -> None:
        self._allocator = allocator
        self._root = root
        # Digests by peer: what it has been offered, and has taken, had, or cannot use.
        self._offered: dict[str, set[bytes]] = {}
        # (peer, session) of whose blocks all have been offered: when the session had been used last.
        self._done: dict[tuple[str, str], float] = {}
        self._shared: list[SessionBlock] = []
        self.batches = 0  # sent so far, by number
        self.crowded = False  # whether running sequences need the blocks that are shared

    def restart(self) -> None:
        """The ring leaves, once more where it has stayed before: everything may be offered to everybody again."""
        self._offered, self._done = {}, {}
        self.crowded = False

    def sessions(self) -> list[str]:
        """Those that have blocks, the last used first."""
        return [session for session, _ in self._allocator.sessions()]

    def size(self, session: str) -> int:
        """Blocks that are kept for it."""
        return len(self._allocator.blocks_of(session, self._root))

    def next_batch(self, peer: str, home: Callable[[str], str], most: int) -> list[SessionBlock]:
        """The next blocks, `most` at most, of the sessions whose `home` is to be `peer`; empty: there are none.
        They are shared until `release`."""
        batch: list[SessionBlock] = []
        for session, last_used in self._allocator.sessions():
            if self._done.get((peer, session)) == last_used or home(session) != peer:
                continue
            if not self._add(batch, peer, session, last_used, most):
                break
            self._done[peer, session] = last_used
        return batch

    def _add(self, batch: list[SessionBlock], peer: str, session: str, last_used: float, most: int) -> bool:
        """Whether there is room for all of the session's blocks."""
        offered = self._offered.setdefault(peer, set())
        for block in self._allocator.blocks_of(session, self._root):
            key = self._allocator.key_of(block)
            if key.digest in offered:
                continue
            if len(batch) >= most:
                return False
            gift = SessionBlock(block, key, session, last_used)
            self._allocator.share([block])
            self._shared.append(gift)
            offered.add(key.digest)
            batch.append(gift)
        return True

    def release(self, batch: list[SessionBlock]) -> None:
        """No rank reads the blocks any more."""
        for gift in reversed(batch):
            self._shared.remove(gift)
            self._allocator.release([gift.block], gift.session, gift.last_used)
        self._allocator.sort_sessions()

    def again(self, peer: str, batch: list[SessionBlock]) -> None:
        """What has not arrived of `batch` is to be offered to `peer` once more."""
        self._offered[peer] -= {gift.key.digest for gift in batch}
        for session in {gift.session for gift in batch}:
            self._done.pop((peer, session), None)

    @property
    def held(self) -> list[int]:
        """Blocks that are shared, as a table. For checks."""
        return [gift.block for gift in self._shared]

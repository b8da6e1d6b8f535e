"""What a leaving ring has to give: the full blocks of its sessions, in batches, the last used sessions first.

    sessions, last used first     s3 [b0 b1 b2]   s2 [b0 b4]   s1 [b0 b5 b6]
    batches for one peer              b0 b1 b2 │ b4 b5 │ b6            a block after its whole beginning, and once

While a batch is on its way its blocks are shared, so that no step writes to them: the ring may go on computing.
"""

from collections.abc import Callable
from typing import NamedTuple

from services.executor.kv_cache.allocator import BlockAllocator
from services.executor.kv_cache.prefix_index import BlockKey


class Gift(NamedTuple):
    """One block on its way to a peer."""

    block: int
    key: BlockKey
    session: str
    last_used: float
    """Of the session, by the steady clock of the ring that gives."""


class Departures:
    """Chooses what goes next. No clock, no I/O."""

    def __init__(self, allocator: BlockAllocator, root: bytes) -> None:
        self._allocator = allocator
        self._root = root
        self._offered: dict[str, set[bytes]] = {}
        """Digests by peer: what it has been offered, and has taken, had, or cannot use."""
        self._done: dict[tuple[str, str], float] = {}
        """(peer, session) of whose blocks all have been offered: when the session had been used last."""
        self._shared: list[Gift] = []
        self.batches = 0
        """Sent so far, by number."""
        self.crowded = False
        """Whether running sequences need the blocks that are shared."""

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

    def next_batch(self, peer: str, home: Callable[[str], str], most: int) -> list[Gift]:
        """The next blocks, `most` at most, of the sessions whose `home` is to be `peer`; empty: there are none.
        They are shared until `release`."""
        batch: list[Gift] = []
        for session, last_used in self._allocator.sessions():
            if self._done.get((peer, session)) == last_used or home(session) != peer:
                continue
            if not self._add(batch, peer, session, last_used, most):
                break
            self._done[peer, session] = last_used
        return batch

    def _add(self, batch: list[Gift], peer: str, session: str, last_used: float, most: int) -> bool:
        """Whether there is room for all of the session's blocks."""
        offered = self._offered.setdefault(peer, set())
        for block in self._allocator.blocks_of(session, self._root):
            key = self._allocator.key_of(block)
            if key.digest in offered:
                continue
            if len(batch) >= most:
                return False
            gift = Gift(block, key, session, last_used)
            self._allocator.share([block])
            self._shared.append(gift)
            offered.add(key.digest)
            batch.append(gift)
        return True

    def release(self, batch: list[Gift]) -> None:
        """No rank reads the blocks any more."""
        for gift in reversed(batch):
            self._shared.remove(gift)
            self._allocator.release([gift.block], gift.session, gift.last_used)
        self._allocator.sort_sessions()

    def again(self, peer: str, batch: list[Gift]) -> None:
        """What has not arrived of `batch` is to be offered to `peer` once more."""
        self._offered[peer] -= {gift.key.digest for gift in batch}
        for session in {gift.session for gift in batch}:
            self._done.pop((peer, session), None)

    @property
    def held(self) -> list[int]:
        """Blocks that are shared, as a table. For checks."""
        return [gift.block for gift in self._shared]

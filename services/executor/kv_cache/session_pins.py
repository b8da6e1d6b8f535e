"""Which cached blocks are kept for which session, and until when.

A session is pinned by use: each of its turns starts its time-to-live again. When it runs out, its blocks
are cached like everybody's.
"""

from collections import OrderedDict


class _Session:
    def __init__(self) -> None:
        self.last_used = 0.0
        self.blocks: dict[int, None] = {}


class SessionPins:
    """Pinned blocks by session. No clock: time comes in as an argument.

    Invariant: a block is kept for one session at most; a session without blocks is not remembered.
    """

    def __init__(self, ttl: float) -> None:
        """`ttl`: seconds that a session stays pinned after its last use; 0: not at all."""
        self.ttl = ttl
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._owners: dict[int, str] = {}

    def add(self, block: int, session: str, now: float) -> None:
        """`block` is kept for `session`, which is used `now`."""
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._sessions[session] = _Session()
        entry.last_used = now
        entry.blocks[block] = None
        self._sessions.move_to_end(session)
        self._owners[block] = session

    def add_older(self, block: int, session: str, last_used: float) -> None:
        """As `add`, for what was used at `last_used` in another ring. `sort` must follow."""
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._sessions[session] = _Session()
            entry.last_used = last_used
        entry.last_used = max(entry.last_used, last_used)
        entry.blocks[block] = None
        self._owners[block] = session

    def sort(self) -> None:
        """The longest unused sessions come first again."""
        self._sessions = OrderedDict(sorted(self._sessions.items(), key=lambda item: item[1].last_used))

    def newest_first(self) -> list[tuple[str, float]]:
        """Every session, and when it was last used."""
        return [(session, entry.last_used) for session, entry in reversed(self._sessions.items())]

    def blocks(self, session: str) -> list[int]:
        """What is kept for `session`."""
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
        """The blocks of sessions that have not been used for `ttl` seconds, in the order in which they came;
        the sessions are forgotten."""
        blocks: list[int] = []
        while self._sessions:
            session, entry = next(iter(self._sessions.items()))
            if entry.last_used + self.ttl > now:
                break
            blocks += entry.blocks
            for block in entry.blocks:
                del self._owners[block]
            del self._sessions[session]
        return blocks

    def blocks_by_session(self) -> dict[str, int]:
        """How many blocks are kept for each session."""
        return {session: len(entry.blocks) for session, entry in self._sessions.items()}

    def __contains__(self, block: int) -> bool:
        return block in self._owners

    def check(self, pinned: set[int]) -> None:
        """Raises AssertionError where the invariant does not hold, or `pinned` are not these blocks."""
        held = [block for entry in self._sessions.values() for block in entry.blocks]
        assert len(held) == len(set(held)), "a block is kept for two sessions"
        assert set(held) == set(self._owners) == pinned, "pins and pinned blocks differ"
        assert all(entry.blocks for entry in self._sessions.values()), "a session without blocks is kept"

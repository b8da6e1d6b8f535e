"""Who gets which session of a ring that leaves, and the sessions' pins: each is moved to who has the session's blocks
by now, by compare-and-set.
"""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from shared.errors import RyzansteinError
from shared.messages import GroupRecord, SessionPin
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key

SERVING = ("ready", "busy")


class Peer:
    """A group that may take sessions over."""

    def __init__(self, record: GroupRecord) -> None:
        self.group = record.group
        self.epoch = record.epoch
        self.room = record.load.free_blocks
        """Blocks, less those of the sessions assigned to it."""


def peers_of(records: Iterable[GroupRecord], model: str, group: str) -> dict[str, Peer]:
    """The groups that serve `model` beside `group`. Whether their blocks are of the same format they know
    themselves."""
    return {
        record.group: Peer(record)
        for record in records
        if record.model == model and record.group != group and record.state in SERVING
    }


def is_coming(records: Iterable[GroupRecord], model: str, group: str) -> bool:
    """Whether another group of `model` is starting."""
    return any(
        record.model == model and record.group != group and record.state == "starting" for record in records
    )


class Homes:
    """Which peer each session goes to: where a scheduler has sent it already, else where there is most room."""

    def __init__(self, peers: dict[str, Peer]) -> None:
        self.peers = peers
        self._homes: dict[str, str] = {}

    def of(self, session: str) -> str:
        """The session's peer; empty: it has none."""
        home = self._homes.get(session, "")
        return home if home in self.peers else ""

    def assign(self, session: str, blocks: int, pinned: str) -> None:
        """`pinned`: the group that the session is pinned to, whatever it is."""
        if not self.peers:
            return
        home = pinned if pinned in self.peers else max(self.peers, key=lambda name: self.peers[name].room)
        self.peers[home].room -= blocks
        self._homes[session] = home

    def drop(self, group: str) -> None:
        """A peer that takes nothing more; its sessions have no home until they are assigned again."""
        self.peers.pop(group, None)


log = structlog.get_logger(__name__)

AT_A_TIME = 64
"""Sessions that are asked for, or moved, at once."""


class PinMover:
    """Reads and moves pins. Without an answer from the broker they stay as they are: the next turn is placed by
    load then, and finds no cache."""

    def __init__(self, bus: Bus, model: str, group: str, ttl: float) -> None:
        self._bus = bus
        self._model = model
        self._group = group
        self._ttl = ttl
        self._bucket: Bucket[SessionPin] | None = None
        self._away = False
        """Whether the broker has not answered: it is not waited for again, since the ring has little time."""

    async def groups(self, sessions: Sequence[str]) -> list[str]:
        """Where each is pinned to; empty: nowhere, as far as can be told."""
        found: list[str] = []
        for start in range(0, len(sessions), AT_A_TIME):
            some = sessions[start : start + AT_A_TIME]
            found += await asyncio.gather(*(self._group_of(session) for session in some))
        return found

    async def move(self, sessions: Sequence[str], group: str, epoch: int) -> None:
        """From this ring, or from nowhere, to another; what a scheduler has pinned elsewhere stays there."""
        for start in range(0, len(sessions), AT_A_TIME):
            some = sessions[start : start + AT_A_TIME]
            await asyncio.gather(*(self._move(session, SessionPin(group, epoch)) for session in some))

    async def _group_of(self, session: str) -> str:
        if self._away:
            return ""
        try:
            entry = await (await self._open()).get(pin_key(self._model, session))
        except RyzansteinError:
            self._away = True
            return ""
        return "" if entry is None else entry.value.group

    async def _move(self, session: str, pin: SessionPin) -> None:
        if self._away:
            return
        key = pin_key(self._model, session)
        try:
            bucket = await self._open()
            entry = await bucket.get(key)
            if entry is None:
                await bucket.create(key, pin)
            elif entry.value.group == self._group:
                await bucket.update(key, pin, entry.revision)
        except RyzansteinError as error:
            self._away = True
            log.warning("session_not_moved", error=str(error))

    async def _open(self) -> Bucket[SessionPin]:
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=self._ttl)
        return self._bucket

"""Who gets which session of a ring that leaves. Pure."""

from collections.abc import Iterable

from shared.messages import GroupRecord

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

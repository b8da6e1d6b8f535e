"""Which group a request goes to.

The session's own group while it is up and not much busier than the rest, else the least loaded.
"Much busier" is bounded by what moving costs: the request's own tokens, which another group would have
to compute again, and a constant.
"""

from typing import Literal

import msgspec

from services.scheduler.groups import Group, GroupTable
from shared.messages import SessionPin

IN_HAND = 256
"""Requests sent to one group and not answered, at most: the rest waits in order of urgency instead."""

Reason = Literal["pinned", "spilled", "moved", "least_loaded"]


class Decision(msgspec.Struct, frozen=True):
    """`pinned`: the session's group. `spilled`: that one was overloaded or silent, the pin stays.
    `moved`: that one is no more, the pin must move. `least_loaded`: there was no pin."""

    group: Group
    reason: Reason


class Placement:
    """Chooses groups out of a table."""

    def __init__(self, table: GroupTable, sticky_tokens: int) -> None:
        self._table = table
        self._sticky_tokens = sticky_tokens

    def alive(self, model: str, pin: SessionPin) -> bool:
        """Whether the ring that `pin` names still stands, with the session's cache."""
        group = self._table.get(pin.group)
        return group is not None and group.model == model and group.epoch == pin.epoch and group.up

    def choose(self, model: str, tokens: int, pin: SessionPin | None) -> Decision | None:
        """The group for a request of `tokens` tokens; None when no open group has room in hand."""
        candidates = [group for group in self._table.open(model) if group.sent_requests < IN_HAND]
        if not candidates:
            return None
        best = min(candidates, key=lambda group: group.score)
        if pin is None:
            return Decision(best, "least_loaded")
        if not self.alive(model, pin):
            return Decision(best, "moved")
        home = self._table.get(pin.group)
        if home in candidates and _work(home) <= _work(best) + tokens + self._sticky_tokens:
            return Decision(home, "pinned")
        return Decision(best, "spilled")


def _work(group: Group) -> int:
    """Waiting tokens, with sequences weighed in."""
    return group.score[1]

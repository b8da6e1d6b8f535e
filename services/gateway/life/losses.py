"""Which lives of rings are over, as events and records tell it. Pure.

    up, serving record ──▶ alive          a ring that was given up and is heard again has not died
    down, gone, hung   ──▶ over           that epoch and all before it

Events and records come on two ways and can overtake each other: the monitor's time stamps tell which of
two is the newer one.
"""

from typing import NamedTuple

from shared.messages import RingDeath


class _Loss(NamedTuple):
    epoch: int
    """This one and all before it are over."""
    at: float
    """The monitor's time, unix seconds; 0: not told."""
    heard_at: float
    """When it was heard of here, monotonic seconds."""
    death: RingDeath | None = None
    """Its cause, where it is known."""


MOST_GROUPS = 4096
"""Groups that are remembered: whose loss was heard of the longest time ago is forgotten first. Records that go on
saying that a group is lost are taken for news of it then, which is heard of once more and does no harm."""


class Losses:
    """The last life of each group that is over."""

    def __init__(self) -> None:
        self._last: dict[str, _Loss] = {}

    def lost(self, group: str, epoch: int, *, at: float, now: float, death: RingDeath | None = None) -> bool:
        """`epoch` of `group`, and all before it, are over since `at` (unix seconds; 0: not told).

        Returns whether that is new. `now`: monotonic seconds.
        """
        last = self._last.get(group)
        if last is not None and epoch <= last.epoch:
            return False
        self._last.pop(group, None)  # so that the newest is the last one
        self._last[group] = _Loss(epoch, max(at, last.at if last else 0.0), now, death)
        if len(self._last) > MOST_GROUPS:
            del self._last[next(iter(self._last))]
        return True

    def alive(self, group: str, epoch: int, *, at: float = 0.0) -> None:
        """`epoch` of `group` was alive at `at` (0: now): what was said of its end before is taken back."""
        last = self._last.get(group)
        if last is not None and last.epoch >= epoch and (not at or at >= last.at):
            self._last[group] = last._replace(epoch=epoch - 1)

    def over_since(self, group: str, epoch: int) -> float | None:
        """When the end of that life was heard of, in monotonic seconds; None while it is not over."""
        last = self._last.get(group)
        return last.heard_at if last is not None and epoch <= last.epoch else None

    def death_of(self, group: str, epoch: int) -> RingDeath | None:
        """What that life has died of, where its executor has told."""
        last = self._last.get(group)
        return (
            last.death if last is not None and last.death is not None and last.death.epoch == epoch else None
        )

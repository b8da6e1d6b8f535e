"""What this scheduler knows of the groups: their records, their replies, and what it has sent them.

A load report is a snapshot; what was sent since is added until the reply to it brings a newer one:

    expected load = last report + requests sent and not answered yet
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages import GroupEvent, GroupLoad, GroupRecord, GroupStatus

SEQUENCE_TOKENS = 64
"""Waiting prompt tokens that weigh as much as one more sequence in a group's batch."""
SCARCE_SHARE = 20
"""Blocks are scarce when fewer than one in so many can be had at once."""
SERVING = ("ready", "busy")
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds that a group gets nothing after it has refused, doubled with each refusal in a row."""


@dataclass(slots=True, eq=False)
class Group:
    """One group as placement sees it."""

    name: str
    model: str
    epoch: int
    status: GroupStatus
    load: GroupLoad
    sent_requests: int = 0
    sent_tokens: int = 0
    closed_until: float = 0.0
    """Monotonic seconds; until then the group gets nothing from this scheduler."""
    refusals: int = 0
    """Refused batches in a row."""
    lost_at: float = 0.0
    """`at` of the last event that took it out of service: older records do not bring it back."""
    chosen: int = 0
    """When it was last chosen, in decisions: ties go round."""
    score: tuple[bool, int, int] = field(default=(False, 0, 0))
    """The lowest is the least loaded."""

    @property
    def up(self) -> bool:
        return self.status in SERVING

    @property
    def idle(self) -> bool:
        return self.load.running + self.load.waiting == 0

    def update_score(self) -> None:
        load = self.load
        scarce = load.free_blocks * SCARCE_SHARE < load.total_blocks
        sequences = load.running + load.waiting + self.sent_requests
        tokens = load.waiting_tokens + self.sent_tokens
        self.score = (scarce, tokens + SEQUENCE_TOKENS * sequences, self.chosen)


class GroupTable:
    """All groups, with the open ones (up, and not closed for a while) by model."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._open: dict[str, list[Group]] = {}
        self._decisions = 0

    def get(self, name: str) -> Group | None:
        return self._groups.get(name)

    def of(self, model: str) -> Iterable[Group]:
        """Every group of `model`, whatever its state."""
        return (group for group in self._groups.values() if group.model == model)

    def open(self, model: str) -> list[Group]:
        """Groups of `model` that may be given requests."""
        return self._open.get(model, [])

    # --- what others say -------------------------------------------------------------------------

    def record(self, record: GroupRecord) -> None:
        """Takes in what the health monitor wrote; another epoch is another ring."""
        group = self._groups.get(record.group)
        if group is not None and record.epoch < group.epoch:
            return
        if group is None or record.epoch > group.epoch or record.model != group.model:
            group = Group(record.group, record.model, record.epoch, record.state, record.load)
            self._groups[record.group] = group
        stale = group.lost_at > 0 and record.updated_at <= group.lost_at and record.state in SERVING
        group.status = group.status if stale else record.state
        if record.load.version >= group.load.version:
            group.load = record.load
        group.update_score()
        self._sort_out()

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)
        self._sort_out()

    def event(self, event: GroupEvent) -> None:
        """Bad news travels faster as an event than as a record; for good news the record decides."""
        group = self._groups.get(event.group)
        if group is None or group.epoch > event.epoch or event.kind == "up":
            return
        group.status = "draining" if event.kind == "draining" else "gone"
        group.lost_at = event.at
        self._sort_out()

    # --- what this scheduler does ----------------------------------------------------------------

    def reserve(self, group: Group, tokens: int) -> None:
        """Counts a request as sent to `group`."""
        self._decisions += 1
        group.chosen = self._decisions
        group.sent_requests += 1
        group.sent_tokens += tokens
        group.update_score()

    def release(self, group: Group, tokens: int) -> None:
        """A request counted with `reserve` was answered, or was not sent after all.

        It may have been counted for the ring that `group` was before: the count never goes below zero.
        """
        group.sent_requests = max(0, group.sent_requests - 1)
        group.sent_tokens = max(0, group.sent_tokens - tokens)
        group.update_score()

    def report(self, group: Group, load: GroupLoad) -> None:
        """Takes in the load of a dispatch reply."""
        if load.version >= group.load.version:
            group.load = load
        group.update_score()

    def accepted(self, group: Group) -> None:
        """A whole batch was taken: earlier refusals are forgotten."""
        group.refusals = 0

    def refused(self, group: Group, now: float) -> None:
        """Something was refused: the group gets nothing for a moment, and longer each time."""
        pause = min(FIRST_PAUSE * 2.0 ** min(group.refusals, 16), LONGEST_PAUSE)
        group.refusals += 1
        self.close(group, now + pause)

    def close(self, group: Group, until: float) -> None:
        """Gives `group` nothing until `until` (monotonic seconds)."""
        group.closed_until = max(group.closed_until, until)
        self._sort_out()

    @property
    def closed(self) -> bool:
        """Whether some group gets nothing for a while."""
        return any(group.closed_until for group in self._groups.values())

    def reopen(self, now: float) -> bool:
        """Opens the groups whose time of closure has passed; says whether there were any."""
        due = [group for group in self._groups.values() if 0.0 < group.closed_until <= now]
        for group in due:
            group.closed_until = 0.0
        if due:
            self._sort_out()
        return bool(due)

    def _sort_out(self) -> None:
        self._open = {}
        for group in self._groups.values():
            if group.up and not group.closed_until:
                self._open.setdefault(group.model, []).append(group)

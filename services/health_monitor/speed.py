"""Which groups are slow, and how slow: measured steps against the group's own past and its peers. Pure.

Steps are compared with steps of about the same number of tokens only (within a factor of two), since a
full batch takes longer than an empty one and is no slower for that.

    weight 1 ──takes SLOW times as long as its past or its peers──▶ weight 1 / that factor
       ▲                                                                  │
       └──────── takes less than FAIR times as long, or has rested ───────┘
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from shared.messages import GroupWork

# Times the usual time of a step from which on a group is slow, and below which it is not any more.
SLOW, FAIR = 2.0, 1.5
RECENT, PAST = 5.0, 300.0  # seconds over which "now" and "usually" are averaged, exponentially
# What must have been seen of a group before it is a measure, for itself or for others.
ENOUGH_STEPS, ENOUGH_SECONDS = 50, 10.0
LEAST_STEP = 0.002  # seconds: below, a step's time is the machine's noise
REST = 30.0  # seconds without a step after which a slow group is tried again
LOWEST = 0.05


@dataclass(slots=True)
class _Mean:
    """Seconds per step, averaged over about `span` seconds."""

    span: float
    value: float = 0.0
    steps: int = 0
    since: float = 0.0
    at: float = 0.0

    def add(self, value: float, steps: int, now: float) -> None:
        if not self.steps:
            self.value, self.since = value, now
        share = 1.0 - math.exp(-max(now - self.at, 0.0) / self.span)
        self.value += share * (value - self.value)
        self.steps += steps
        self.at = now

    @property
    def counts(self) -> bool:
        return self.steps >= ENOUGH_STEPS and self.at - self.since >= ENOUGH_SECONDS


@dataclass(slots=True)
class _Group:
    model: str
    epoch: int
    work: GroupWork
    weight: float = 1.0
    at: float = 0.0  # when it last made a step
    # By the number of tokens of a step, as a power of two.
    recent: dict[int, _Mean] = field(default_factory=dict)
    past: dict[int, _Mean] = field(default_factory=dict)


class Speeds:
    """Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def observe(self, group: str, model: str, epoch: int, work: GroupWork, now: float) -> float:
        """Takes in what a group has done since its ring started; returns its weight, LOWEST to 1."""
        entry = self._groups.get(group)
        if entry is None or entry.model != model:
            self._groups[group] = _Group(model, epoch, work, at=now)
            return 1.0
        if entry.epoch != epoch:  # another ring on the same machine: its past still says what is usual
            entry.epoch, entry.work, entry.weight, entry.recent, entry.at = epoch, work, 1.0, {}, now
            return 1.0
        steps = work.steps - entry.work.steps
        if steps > 0:
            self._add(entry, work, steps, now)
        elif now - entry.at >= REST:
            entry.weight = 1.0
            entry.recent.clear()
        return entry.weight

    def keep(self, groups: Iterable[str]) -> None:
        """Forgets all groups but these."""
        known = set(groups)
        self._groups = {name: entry for name, entry in self._groups.items() if name in known}

    def _add(self, entry: _Group, work: GroupWork, steps: int, now: float) -> None:
        seconds = (work.seconds - entry.work.seconds) / steps
        size = ((work.tokens - entry.work.tokens) // steps).bit_length()
        entry.work, entry.at = work, now
        entry.recent.setdefault(size, _Mean(RECENT)).add(seconds, steps, now)
        factor = self._factor(entry, size)
        fast = factor < (FAIR if entry.weight < 1.0 else SLOW)
        entry.weight = 1.0 if fast else round(max(LOWEST, 1.0 / factor), 2)
        # What is slow for long becomes usual (longer texts take longer), except for its peers.
        entry.past.setdefault(size, _Mean(PAST)).add(seconds, steps, now)

    def _factor(self, entry: _Group, size: int) -> float:
        """How many times as long as usual the group's steps of this size take."""
        recent = entry.recent[size].value
        if recent < LEAST_STEP:
            return 1.0
        own = entry.past.get(size)
        usual = [own.value] if own is not None and own.counts else []
        peers = [
            past.value
            for peer in self._groups.values()
            if peer is not entry and peer.model == entry.model
            if (past := peer.past.get(size)) is not None and past.counts
        ]
        if peers:
            usual.append(median(peers))
        return recent / max(min(usual), LEAST_STEP) if usual else 1.0

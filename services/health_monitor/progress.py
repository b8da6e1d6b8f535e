"""Whether the ranks of a ring move: the difference between busy and hung.

Only what was observed counts. A rank stands still from the first beat to the last one that show the
same counters with a step in flight; lost beats prove nothing.
"""

from dataclasses import dataclass

from shared.messages import GroupLoad, RankBeat


@dataclass(slots=True)
class _Rank:
    beat: RankBeat
    moved: float
    """When it was first seen with these counters, a step in flight and work for its group."""


class RingProgress:
    """The progress counters of one ring."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._worked = False

    def observe(self, ranks: list[RankBeat], load: GroupLoad, now: float) -> None:
        """Takes in the ranks of one beat. Without work for the group, nothing need move."""
        work = load.running + load.waiting > 0
        must_move = work and self._worked
        seen: dict[int, _Rank] = {}
        for beat in ranks:
            known = self._ranks.get(beat.rank)
            if known is not None and must_move and known.beat == beat and beat.in_flight:
                seen[beat.rank] = known
            else:
                seen[beat.rank] = _Rank(beat, now)
        self._ranks = seen
        self._worked = work

    def hung(self, now: float, after: float) -> list[int]:
        """Ranks that stand still since `after` seconds or more, as of a beat at `now`."""
        return [rank for rank, known in self._ranks.items() if now - known.moved >= after]

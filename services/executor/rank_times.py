"""What a rank spends on steps that somebody traces: three words of its row on the board.

    | steps | nanoseconds | of these communicating |

A rank adds to them after a step whose plan is `traced`; the leader reads all rows when a traced attempt ends. A step
that nobody traces costs a look at a flag.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from services.executor.engine.plan import StepPlan

T = TypeVar("T")
WORDS = 3
_STEPS, _SPENT, _COMMUNICATING = range(WORDS)
UNKNOWN = -1


class RankTime(NamedTuple):
    """Over the traced steps so far. Times in nanoseconds."""

    steps: int = 0
    spent: int = 0
    communicating: int = 0
    """Waiting for the other ranks counts; `UNKNOWN` where that is not measured."""

    def since(self, before: "RankTime") -> "RankTime":
        """What has come since `before`."""
        measured = UNKNOWN not in (self.communicating, before.communicating)
        communicating = self.communicating - before.communicating if measured else UNKNOWN
        return RankTime(self.steps - before.steps, self.spent - before.spent, communicating)


class RankClock:
    """One rank's words, for that rank to write."""

    def __init__(self, words: memoryview, offset: int) -> None:
        self._words = words
        self._offset = offset
        self.communicating: Callable[[], float] | None = None
        """Seconds that the rank has spent on communication so far; None: nobody knows."""

    def run(self, plan: StepPlan, step: Callable[[], T]) -> T:
        """What `step` returns; its time is counted where `plan` is traced."""
        if not plan.traced:
            return step()
        heard = self.communicating() if self.communicating is not None else 0.0
        began = time.perf_counter_ns()
        try:
            return step()
        finally:
            words, offset = self._words, self._offset
            words[offset + _SPENT] += time.perf_counter_ns() - began
            if self.communicating is None:
                words[offset + _COMMUNICATING] = UNKNOWN
            else:
                words[offset + _COMMUNICATING] += round((self.communicating() - heard) * 1e9)
            words[offset + _STEPS] += 1

"""What a rank spends on steps that somebody traces: three words of its row on the board.

    | steps | nanoseconds | of these communicating |

A rank adds to them after a step whose plan is `traced`; the leader reads all rows when a traced attempt ends. A step
that nobody traces costs a look at a flag.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from services.executor.engine.plan import StepPlan

T = TypeVar("T")
WORDS = 3
_STEPS, _SPENT, _COMMUNICATING = range(WORDS)


class Communicating(Protocol):
    """The collectives, for what they say of their time."""

    @property
    def busy_seconds(self) -> float: ...


class RankTime(NamedTuple):
    """Over the traced steps so far. Times in nanoseconds."""

    steps: int = 0
    spent: int = 0
    communicating: int = 0
    """Waiting for the other ranks counts. On GPUs an estimate: one operation in some is timed."""

    def since(self, before: "RankTime") -> "RankTime":
        """What has come since `before`."""
        return RankTime(*(now - then for now, then in zip(self, before, strict=True)))


class RankClock:
    """One rank's words, for that rank to write."""

    def __init__(self, words: memoryview, offset: int) -> None:
        self._words = words
        self._offset = offset
        self.collectives: Communicating | None = None
        """None: the rank has none, as a stub."""

    def run(self, plan: StepPlan, step: Callable[[], T]) -> T:
        """What `step` returns; its time is counted where `plan` is traced."""
        if not plan.traced:
            return step()
        before = self._communicated()
        began = time.perf_counter_ns()
        try:
            return step()
        finally:
            words, offset = self._words, self._offset
            words[offset + _SPENT] += time.perf_counter_ns() - began
            words[offset + _COMMUNICATING] += round((self._communicated() - before) * 1e9)
            words[offset + _STEPS] += 1

    def _communicated(self) -> float:
        return 0.0 if self.collectives is None else self.collectives.busy_seconds

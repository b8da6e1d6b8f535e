"""What a trainer does next: a state machine without clock or tensors.

    compute ──▶ compute ──▶ ... ──▶ save ──▶ close the epoch ──▶ compute ... ──▶ finish
                                     └──▶ rest (somebody wants a pause)

A state that was written at the end of an epoch comes before what is done there (validation, the adapter): whoever goes
on from it does that again, and gives the same. So a death at any moment leaves nothing out.
"""

from dataclasses import dataclass
from typing import Literal

from services.executor.training.trainer.schedule import Course

LEAST_INTERVAL = 60.0  # seconds
_COST = 100  # of the time between two states one part of so many is spent on writing one
_BYTES_PER_SECOND = 4e6  # that states take of the way to the object store, on average

# compute: the step after `Loop.done`; save: write a state; close_epoch: validate and write the adapter; rest: end, to
# go on later.
Action = Literal["compute", "save", "close_epoch", "finish", "rest"]


@dataclass
class Loop:
    course: Course
    done: int  # steps that are computed
    # When a state was written last, or the trainer began. Seconds of a clock that only goes forwards: it decides when
    # a state is written, never what is computed.
    saved_at: float
    least_interval: float = LEAST_INTERVAL  # seconds between two states, at least; 0: one after every step

    def __post_init__(self) -> None:
        self._saved = self.done
        self._closed = -1  # the step whose epoch is closed
        self._interval = self.least_interval

    @property
    def is_whole(self) -> bool:
        """Whether all steps are computed."""
        return self.done >= self.course.steps

    def next(self, now: float, *, pause: bool) -> Action:
        """`now`: seconds, as `saved_at`; `pause`: somebody wants one."""
        ends_epoch = self.course.ends_epoch(self.done) and self._closed != self.done
        due = pause or ends_epoch or now - self.saved_at >= self._interval
        if self._saved != self.done and due:
            return "save"
        if pause:
            return "rest"
        if ends_epoch:
            return "close_epoch"
        return "finish" if self.is_whole else "compute"

    def computed(self) -> None:
        """The step is done."""
        self.done += 1

    def saved(self, now: float, seconds: float, size: int) -> None:
        """A state of `size` bytes is written at `now`, which took `seconds`."""
        self._saved, self.saved_at = self.done, now
        if self.least_interval:
            self._interval = max(self.least_interval, _COST * seconds, size / _BYTES_PER_SECOND)

    def closed(self) -> None:
        """What is due at the end of the epoch is done."""
        self._closed = self.done

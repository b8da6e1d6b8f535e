"""The steps that have been scheduled and are not over: none, one, or two, of which the later was planned ahead.

    schedule ──▶ oldest ──close──▶          the engine computes them in this order, and they are closed in it
    schedule_ahead ──▶ later ──▶ oldest

What is in a step keeps its blocks until the step is closed, whatever becomes of it: the ranks still write to them.
"""

from collections.abc import Collection

from services.executor.engine.block_tables import BlockTables
from services.executor.engine.plan_builder import NO_STEP, Step
from services.executor.engine.sequence import Sequence, SequenceState
from services.executor.engine.step_planning import StepPlanner


class StepsUnderWay:
    """Of one batcher."""

    def __init__(self, tables: BlockTables, planner: StepPlanner) -> None:
        self._tables = tables
        self._planner = planner
        self.oldest = NO_STEP
        self.later = NO_STEP

    @property
    def newest(self) -> Step:
        """The one that was scheduled last."""
        return self.oldest if self.later is NO_STEP else self.later

    @property
    def alone(self) -> bool:
        """Whether there is exactly one."""
        return self.oldest is not NO_STEP and self.later is NO_STEP

    def begin(self, step: Step) -> None:
        """`step` has been planned, and is about to be sent."""
        for chunk in step.batch:
            chunk.sequence.in_flight = True
        if self.oldest is NO_STEP:
            self.oldest = step
        else:
            self.later = step

    def close(self, failed_slots: Collection[int] = ()) -> Step:
        """The oldest is over; it is returned."""
        step, self.oldest, self.later = self.oldest, self.later, NO_STEP
        for chunk in step.batch:
            chunk.sequence.in_flight = False
        for chunk in self.oldest.batch:
            chunk.sequence.in_flight = True
        for chunk in step.batch:
            sequence = chunk.sequence
            if sequence.in_flight:
                continue
            if sequence.state is SequenceState.ENDED:
                self._tables.free(sequence)
            else:
                self._tables.trim(sequence)
        for sequence in self._tables.close(failed_slots):
            self._planner.preempt(sequence)
        return step

    def drop(self, failed_slots: Collection[int] = ()) -> Step:
        """All are over, and nothing that they have computed counts: it is computed again. Returns the oldest."""
        step = self.close(failed_slots)
        if self.oldest is not NO_STEP:
            self.close()
        return step

    @property
    def ended(self) -> list[Sequence]:
        """Sequences that have ended and still have their blocks."""
        return [chunk.sequence for chunk in self.oldest.batch if chunk.sequence.state is SequenceState.ENDED]

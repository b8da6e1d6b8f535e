"""The interface of features: what a step does for them beside computing tokens.

a request       `RequestChecks`: whether it can be computed
before a step   fields of its plan, and who takes what comes of it
behind it       each `ResultHandler` ──▶ sequences that are over
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.adapter_slots import AdapterSlots
from services.executor.scheduler.admission import NO_CHECKS, RequestChecks
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.state_slots import Rows
from services.executor.scheduler.steps import ResultHandler, ScheduledTokens, in_order


class FeatureContext(NamedTuple):
    spec: EngineSpec
    tables: BlockTables
    running: Seq[Sequence]  # those that run, at any time
    slots: AdapterSlots
    directories: Mapping[str, str]  # where the files of adapters are, by digest


class PlannedStep:
    """A step that is about to be sent, and whose copies were not taken yet."""

    def __init__(self, batch: Seq[ScheduledTokens], ahead: Rows | None = None) -> None:
        """`ahead`: its rows, where it is planned before the tokens of the step before it are known; its sequences stand
        where that one began then."""
        self.batch = batch
        self.ahead = ahead
        self.handlers: list[ResultHandler] = []

    @cached_property
    def rows(self) -> Rows:
        if self.ahead is not None:
            return self.ahead
        return [(c.sequence, c.sequence.num_computed, c.length, len(c.drafts)) for c in in_order(self.batch)]


# Fields of a step's `StepPlan`; None: it needs none of this. May have blocks evicted, and add to its handlers.
StepFields = Callable[[PlannedStep], Mapping[str, Any] | None]


class PlaceClaims(Protocol):
    """Of one step: who of those that wait may have a place in the batch. They are asked about in order of urgency."""

    def admits(self, sequence: Sequence) -> bool:
        """If not, it has a claim from now on, where there is something left to claim."""
        ...

    def lenders(self, sequence: Sequence, batch: Seq[Sequence]) -> list[Sequence]:
        """Of `batch`, the running sequences of the batch lane, those which would have to give up their places so that
        one that it does not admit can have what it lacks; none: that would not help."""
        ...

    def withdraw(self, sequence: Sequence) -> None:
        """They have done so: `sequence` claims nothing any more."""
        ...


class StepBudget(Protocol):
    """Of one step: how much it computes of sequences that are `budgeted`, where tokens are not all that counts."""

    def most(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens it may compute; 0: it has to wait."""
        ...

    def charge(self, sequence: Sequence, length: int) -> None:
        """It computes the next `length` tokens."""
        ...


class StepFeature(NamedTuple):
    """What a feature does in one ring; None of anything that it does not need."""

    fields: StepFields | None = None
    claims: Callable[[], PlaceClaims] | None = None  # asked for once in a step, if anybody waits
    budget: Callable[[], StepBudget] | None = None  # asked for once in a step, if a sequence is `budgeted`
    admitted: Callable[[Sequence], None] | None = None  # a sequence gets a place
    left: Callable[[Sequence], None] | None = None  # it runs no more
    # Raises AssertionError where an invariant does not hold for those that run. For tests, and for idle moments.
    check: Callable[[Collection[Sequence]], None] | None = None


FeatureMaker = Callable[[FeatureContext], StepFeature | None]  # None: this engine has no use for it


class Feature(NamedTuple):
    """A line of the catalog."""

    make: FeatureMaker
    checks: RequestChecks = NO_CHECKS

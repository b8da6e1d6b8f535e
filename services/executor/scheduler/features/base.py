"""The interface of features: what a step does for them beside computing tokens.

a request       `RequestChecks`: whether it can be computed
before a step   fields of its plan, and who takes what comes of it
behind it       each `ResultHandler` ──▶ sequences that are over
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.admission import NO_CHECKS, RequestChecks
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.state_slots import Rows
from services.executor.scheduler.step_planner import StepPlanner
from services.executor.scheduler.steps import ResultHandler, ScheduledTokens, in_order


class FeatureContext(NamedTuple):
    spec: EngineSpec
    tables: BlockTables
    planner: StepPlanner
    directories: Mapping[str, str]
    """Where the files of adapters are, by digest."""


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


StepFeature = Callable[[PlannedStep], Mapping[str, Any] | None]
"""Fields of a step's `StepPlan`; None: it needs none of this. May have blocks evicted, and add to its handlers."""
FeatureMaker = Callable[[FeatureContext], StepFeature | None]
"""None: this engine has no use for it."""


class Feature(NamedTuple):
    """A line of the catalog."""

    make: FeatureMaker
    checks: RequestChecks = NO_CHECKS

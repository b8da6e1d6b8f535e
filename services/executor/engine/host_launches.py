"""`Engine.launch` for engines that compute in the thread that calls them: a step is computed when its result is asked
for. Nothing overlaps, and by then the tokens of the step before it are known."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from services.executor.engine.plan import StepPlan, as_int32, to_bytes
from services.executor.engine.protocol import Launched, SampledToken
from services.executor.engine.sampling_state import SamplingState

Execute = Callable[[StepPlan, Sequence[SamplingState]], list[SampledToken]]


class HostLaunches:
    """Of one engine."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._tokens: list[SampledToken] = []
        """Of the last step whose result was asked for; empty where it has failed."""

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        return _Deferred(self, plan, samples)

    def compute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        """What `execute` gives for a plan that may be ahead."""
        before, self._tokens = self._tokens, []
        self._tokens = self._execute(with_tokens(plan, before), samples)
        return self._tokens


class _Deferred:
    def __init__(self, launches: HostLaunches, plan: StepPlan, samples: Sequence[SamplingState]) -> None:
        self._launches, self._plan, self._samples = launches, plan, samples

    def result(self) -> list[SampledToken]:
        return self._launches.compute(self._plan, self._samples)


def with_tokens(plan: StepPlan, before: Sequence[SampledToken]) -> StepPlan:
    """`plan` with the tokens that the step before it has sampled. Where that has failed (`before` is empty) nobody
    wants to know what this one gives: it computes token 0."""
    ids = as_int32(plan.token_ids)
    if not (ids < 0).any():
        return plan
    tokens = np.array([one.token for one in before] or [0], np.int32)
    rows = -1 - ids if before else np.zeros_like(ids)
    return structs.replace(plan, token_ids=to_bytes(np.where(ids < 0, tokens[np.maximum(rows, 0)], ids)))

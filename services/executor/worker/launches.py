"""`Engine.launch`. Pure but for the calls that it is given.

Where a device computes and samples beside the thread that calls:

    launch n, launch n+1        both begin at once where the device samples their rows
    result n                    waits for the device

A step that the host samples (penalties, grammars, log probabilities), or that the calling thread computes itself,
begins when its result is asked for: by then the tokens of the step before it are known. The step behind it begins as
soon as its tokens are.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from services.executor.core.engine import Launched, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from shared.errors import RyzansteinError

Execute = Callable[[StepPlan, Sequence[SamplingState]], list[SampledToken]]


def with_tokens(plan: StepPlan, before: Sequence[SampledToken]) -> StepPlan:
    """`plan` with the tokens that the step before it has sampled. Where that has failed (`before` is empty) nobody
    wants to know what this one gives: it computes token 0."""
    ids = as_int32(plan.token_ids)
    if not (ids < 0).any():
        return plan
    tokens = np.array([one.token for one in before] or [0], np.int32)
    rows = -1 - ids if before else np.zeros_like(ids)
    return structs.replace(plan, token_ids=to_bytes(np.where(ids < 0, tokens[np.maximum(rows, 0)], ids)))


# The tokens of a step that the device has been given, once they are there. Raises as `Engine.execute` does.
Result = Callable[[], list[SampledToken]]
Begin = Callable[[StepPlan, Sequence[SamplingState]], Result | None]


class Launches:
    """The steps of one engine that were launched and whose results were not asked for."""

    def __init__(self, execute: Execute, begin: Begin | None = None) -> None:
        """`execute` computes on the host's time. `begin` has the device compute a plan, or gives None where the host
        must; token ids of -1 - k in it stand for what row k of the last step that was begun has sampled."""
        self._execute, self._begin = execute, begin
        self._steps: deque[_Step] = deque()  # in their order
        # Of the last step whose result was asked for; empty where it has failed.
        self._tokens: list[SampledToken] = []

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        step = _Step(self, plan, samples)
        self._steps.append(step)
        self._begin_those_that_may()
        return step

    def take(self, step: "_Step") -> list[SampledToken]:
        """The result of the oldest step, which `step` is."""
        before, self._tokens = self._tokens, []
        try:
            if step.error is not None:
                raise step.error
            if step.begun is not None:
                self._tokens = step.begun()
            else:
                self._tokens = self._execute(with_tokens(step.plan, before), step.samples)
            return self._tokens
        finally:
            self._steps.popleft()
            self._begin_those_that_may()

    def _begin_those_that_may(self) -> None:
        if self._begin is None:
            return
        before: _Step | None = None
        for step in self._steps:
            if step.begun is None and step.error is None:
                plan = step.plan if before is not None else with_tokens(step.plan, self._tokens)
                try:
                    step.begun = self._begin(plan, step.samples)
                except RyzansteinError as error:  # told to whoever asks for the result
                    step.error = error
                else:
                    if step.begun is None:
                        return
            before = step


class _Step:
    def __init__(self, launches: Launches, plan: StepPlan, samples: Sequence[SamplingState]) -> None:
        self._launches, self.plan, self.samples = launches, plan, samples
        self.begun: Result | None = None
        self.error: RyzansteinError | None = None

    def result(self) -> list[SampledToken]:
        return self._launches.take(self)

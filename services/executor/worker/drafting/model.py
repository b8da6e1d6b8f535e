"""A ring's draft model: a smaller one on the same ranks, which keeps its keys and values in page layers of its own of
the same KV blocks (docs/adr/0033).

What it proposes decides nothing: a proposal is put out where it is what the model that is served draws.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
from torch import Tensor

from services.executor.core.draft_passes import DraftPasses, plan_for_draft
from services.executor.core.engine import BadLogits, DraftPlan, DraftToken
from services.executor.core.progress import ProgressCounter
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.sampling.candidates import RowLogits
from services.executor.sampling.sampler import RowKernels, Sampler
from services.executor.worker.drafting.translation import Translation
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share

log = structlog.get_logger(__name__)

_UNKNOWN = DraftToken(0, 0.0)  # a proposal that is none

# Has all ranks compute a plan; the logits of its rows.
Compute = Callable[[StepPlan, Sequence[SamplingState]], Tensor | RowLogits]


class DraftModel:
    """One rank's share of it."""

    def __init__(self, share: Share, runner: ModelRunner, translation: Translation | None = None) -> None:
        """`translation`: None where both have one vocabulary."""
        self.share = share
        self.runner = runner
        self.translation = translation
        if translation is not None:
            runner.leave_out(translation.without)
        self.vocab_size = runner.vocab_size
        self.context_length = share.facts.context_length

    def follow(self, plan: StepPlan, progress: ProgressCounter) -> None:
        """Computes the rows of a step of the model that is served."""
        if int(as_int32(plan.positions).min()) < self.context_length:
            self.runner.forward(self._own(plan), progress)

    def copied(self, plan: StepPlan) -> None:
        """Compresses its own keys and values of the blocks that a step fills which it does not follow: rounds of
        proposals have computed them, or nobody reads them."""
        if plan.compressions and not plan.followed:
            self.runner.compress(plan)

    reads_states = False  # it reads tokens alone
    reads_layers: tuple[int, ...] | None = None

    def watching(self, model: Any, plan: StepPlan) -> AbstractContextManager[object]:
        return nullcontext()

    def take(self, plan: StepPlan, states: Tensor) -> None:
        raise AssertionError("a model of its own reads no states")

    def forward(self, plan: StepPlan, progress: ProgressCounter) -> Tensor | RowLogits | None:
        """Computes a plan that is `of_draft`, as `ModelRunner.forward` does."""
        return self.runner.forward(self._own(plan), progress)

    def _own(self, plan: StepPlan) -> StepPlan:
        names = None if self.translation is None else self.translation.of_target
        return plan_for_draft(plan, self.vocab_size, self.context_length, names)


class DraftSampler:
    """Draws a draft model's proposals, on rank 0. Keeps nothing between calls."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        block_size: int,
        translation: Translation | None = None,
        kernels: RowKernels | None = None,
    ) -> None:
        """`vocab_size`: of the model that is served; `context_length`, `translation`: of the draft model."""
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._block_size = block_size
        self._translation = translation
        self._sampler = Sampler(kernels)

    def propose(self, draft: DraftPlan, samples: Sequence[SamplingState], compute: Compute) -> list[list[DraftToken]]:
        """`Engine.draft`. Behind a token that the model that is served does not have, or a position that the draft
        model does not have, all proposals have the probability 0."""
        passes = DraftPasses(draft, self._block_size)
        states = [state.of_draft() for state in samples]
        proposed: list[list[DraftToken]] = [[] for _ in states]
        tokens: list[int] = []
        for number in range(draft.count):
            drawn = self._drawn(compute(passes.plan(number, tokens), states), states)
            if drawn is None:
                return [[*row, *[_UNKNOWN] * (draft.count - len(row))] for row in proposed]
            for row, position, token in zip(proposed, passes.positions.tolist(), drawn, strict=True):
                known = token.token < self._vocab_size and position + number < self._context_length
                row.append(token if known and (not row or row[-1].probability) else _UNKNOWN)
            tokens = [row[-1].token for row in proposed]
            states = [state.later() for state in states]
        return proposed

    def _drawn(self, logits: Tensor | RowLogits, states: Sequence[SamplingState]) -> list[DraftToken] | None:
        """None where the draft model computes what is no number."""
        if self._translation is not None and isinstance(logits, RowLogits):
            logits = self._translation.translated(logits)
        try:
            found = self._sampler.sample(logits, states)
        except BadLogits as error:
            log.warning("draft_model_not_finite", rows=len(error.rows))
            return None
        return [DraftToken(one.token, math.exp(one.logprobs.logprob)) for one in found if one.logprobs]

"""Sparse attention: what the tokens of each sequence read."""

from collections.abc import Collection

from services.executor.core.engine import EngineSpec
from services.executor.core.sparse_attention import DENSE, problem_with
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.admission import RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from services.executor.scheduler.sequence import Sequence
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest


def _check(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    wanted = request.sparse
    return None if wanted is None else problem_with(wanted, spec.block_size, spec.sparse)


class _SparseChoices:
    def __init__(self) -> None:
        self._choosing = 0  # how many of those that run choose which earlier tokens they read

    def admitted(self, sequence: Sequence) -> None:
        self._choosing += sequence.choice.kind != DENSE

    def left(self, sequence: Sequence) -> None:
        self._choosing -= sequence.choice.kind != DENSE

    def fields(self, step: PlannedStep) -> dict[str, bytes] | None:
        if not self._choosing:
            return None
        return {"sparse": to_bytes([number for row in step.rows for number in row[0].choice])}

    def check(self, running: Collection[Sequence]) -> None:
        choosing = sum(s.choice.kind != DENSE for s in running)
        assert self._choosing == choosing, "those that choose what they read are counted wrongly"


def _make(context: FeatureContext) -> StepFeature | None:
    if not context.spec.sparse:
        return None
    choices = _SparseChoices()
    return StepFeature(choices.fields, admitted=choices.admitted, left=choices.left, check=choices.check)


SPARSE_CHOICES = Feature(_make, RequestChecks(check=_check))

"""Sparse attention: what the tokens of each sequence read."""

from services.executor.core.engine import EngineSpec
from services.executor.core.sparse_attention import problem_with
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.admission import RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest


def _check(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    wanted = request.sparse
    return None if wanted is None else problem_with(wanted, spec.block_size, spec.sparse)


def _make(context: FeatureContext) -> StepFeature | None:
    planner = context.planner

    def fields(step: PlannedStep) -> dict[str, bytes] | None:
        if not planner.choosing:
            return None
        return {"sparse": to_bytes([number for row in step.rows for number in row[0].choice])}

    return fields if context.spec.sparse else None


SPARSE_CHOICES = Feature(_make, RequestChecks(check=_check))

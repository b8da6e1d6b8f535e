"""Pairs of texts in one prompt, of models that read it whole: where the second one begins."""

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.admission import RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest


def _check(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    if 0 <= request.second_segment <= len(request.prompt):
        return None
    return InvalidRequest(
        f"second_segment is {request.second_segment} and must be between 0 and the prompt's "
        f"{len(request.prompt)} tokens."
    )


def _fields(step: PlannedStep) -> dict[str, bytes] | None:
    begins = [row[0].request.second_segment for row in step.rows]
    return {"second_segments": to_bytes(begins)} if any(begins) else None


def _make(context: FeatureContext) -> StepFeature | None:
    return StepFeature(_fields) if context.spec.whole_prompts else None


SEGMENTS = Feature(_make, RequestChecks(check=_check))

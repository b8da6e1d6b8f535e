"""Pairs of texts in one prompt, of models that read it whole: where the second one begins."""

from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.features.base import FeatureContext, PlannedStep, StepFeature


def _fields(step: PlannedStep) -> dict[str, bytes] | None:
    begins = [row[0].request.second_segment for row in step.rows]
    return {"second_segments": to_bytes(begins)} if any(begins) else None


def segments(context: FeatureContext) -> StepFeature | None:
    return _fields if context.spec.whole_prompts else None

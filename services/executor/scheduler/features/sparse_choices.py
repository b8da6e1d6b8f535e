"""Sparse attention: what the tokens of each sequence read."""

from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.features.base import FeatureContext, PlannedStep, StepFeature


def sparse_choices(context: FeatureContext) -> StepFeature | None:
    planner = context.planner

    def fields(step: PlannedStep) -> dict[str, bytes] | None:
        if not planner.choosing:
            return None
        return {"sparse": to_bytes([number for row in step.rows for number in row[0].choice])}

    return fields if context.spec.sparse else None

"""States of layers that keep one for each sequence, in slots (`state_slots.py`)."""

from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature


def _make(context: FeatureContext) -> StepFeature | None:
    tables, running = context.tables, context.running

    def fields(step: PlannedStep) -> dict[str, bytes]:
        """Snapshots may have blocks evicted."""
        room = tables.free_blocks(running) - tables.reserve(len(running))
        return tables.states.plan(step.rows, room)

    return StepFeature(fields) if tables.states.total else None


RECURRENT_STATES = Feature(_make)

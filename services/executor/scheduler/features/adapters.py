"""LoRA adapters: the slot of each sequence's (`adapter_slots.py`), and those that are read into slots first."""

from typing import Any

from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.adapter_slots import NO_SLOT
from services.executor.scheduler.features.base import FeatureContext, PlannedStep, StepFeature


def adapters(context: FeatureContext) -> StepFeature | None:
    held, directories = context.planner.slots, context.directories

    def fields(step: PlannedStep) -> dict[str, Any] | None:
        if held.empty:
            return None
        loads = [(slot, directories[digest]) for slot, digest in held.take_loads().items()]
        slots = [row[0].adapter_slot for row in step.rows]
        if not loads and max(slots, default=NO_SLOT) == NO_SLOT:
            return None
        return {"adapters": to_bytes(slots), "adapter_loads": loads}

    return fields if context.spec.max_adapters > 0 else None

"""LoRA adapters: the slot of each sequence's (`adapter_slots.py`), and those that are read into slots first."""

from typing import Any

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.adapter_slots import NO_SLOT
from services.executor.scheduler.admission import RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest
from shared.messages.registry import DIGEST_DIGITS, is_digest


def _check(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    if not request.adapter:
        return None
    if not is_digest(request.adapter):
        return InvalidRequest(
            f"The request's adapter is not a digest of {DIGEST_DIGITS} hexadecimal digits in lower case."
        )
    if not spec.max_adapters:
        return InvalidRequest(
            "This group computes no LoRA adapters; start it with --max-adapters above 0, or ask for the model alone."
        )
    return None


def _make(context: FeatureContext) -> StepFeature | None:
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


ADAPTERS = Feature(_make, RequestChecks(check=_check))

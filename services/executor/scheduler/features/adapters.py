"""LoRA adapters: the slot of each sequence's (`adapter_slots.py`), and those that are read into slots first."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.adapter_slots import LOADS_PER_STEP, NO_SLOT, AdapterSlots
from services.executor.scheduler.admission import RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from services.executor.scheduler.sequence import Sequence
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


class SlotClaims:
    """`PlaceClaims`: a sequence needs its adapter's slot."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._claimed: set[int] = set()
        self._waiting: set[str] = set()  # adapters that have found every slot in use

    def admits(self, sequence: Sequence) -> bool:
        digest = sequence.request.adapter
        if not digest:
            return True
        if digest in self._waiting:
            return False
        if self._slots.find(digest, self._claimed) != NO_SLOT:
            return self._slots.holds(digest) or len(self._slots.pending) < LOADS_PER_STEP
        self._waiting.add(digest)
        claimed = self._slots.fewest(self._claimed)
        if claimed != NO_SLOT:
            self._claimed.add(claimed)
        return False

    def lenders(self, sequence: Sequence, batch: Seq[Sequence]) -> list[Sequence]:
        """The sequences of a slot that only the batch lane uses, of the one with the fewest."""
        if sequence.request.adapter not in self._waiting:
            return []
        lent: dict[int, list[Sequence]] = {}
        for one in batch:
            if one.adapter_slot != NO_SLOT and not one.in_flight:
                lent.setdefault(one.adapter_slot, []).append(one)
        whole = [users for slot, users in lent.items() if len(users) == self._slots.users(slot)]
        return min(whole, key=len, default=[])

    def withdraw(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence.request.adapter)
        self._claimed.clear()


class _Adapters:
    def __init__(self, slots: AdapterSlots, directories: Mapping[str, str]) -> None:
        self._slots = slots
        self._directories = directories

    def admitted(self, sequence: Sequence) -> None:
        if sequence.request.adapter:
            sequence.adapter_slot = self._slots.take(sequence.request.adapter)

    def left(self, sequence: Sequence) -> None:
        if sequence.adapter_slot != NO_SLOT:
            self._slots.release(sequence.adapter_slot)
            sequence.adapter_slot = NO_SLOT

    def fields(self, step: PlannedStep) -> dict[str, Any] | None:
        if self._slots.empty:
            return None
        loads = [(slot, self._directories[digest]) for slot, digest in self._slots.take_loads().items()]
        slots = [row[0].adapter_slot for row in step.rows]
        if not loads and max(slots, default=NO_SLOT) == NO_SLOT:
            return None
        return {"adapters": to_bytes(slots), "adapter_loads": loads}

    def check(self, running: Collection[Sequence]) -> None:
        with_adapter = [s for s in running if s.request.adapter]
        assert all(s.adapter_slot != NO_SLOT for s in with_adapter), "a sequence runs without its adapter"
        self._slots.check((s.adapter_slot, s.request.adapter) for s in with_adapter)


def _make(context: FeatureContext) -> StepFeature | None:
    if context.spec.max_adapters <= 0:
        return None
    held = _Adapters(context.slots, context.directories)
    return StepFeature(
        held.fields, claims=partial(SlotClaims, context.slots), admitted=held.admitted, left=held.left, check=held.check
    )


ADAPTERS = Feature(_make, RequestChecks(check=_check))

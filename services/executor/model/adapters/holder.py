"""What holds the adapters of a rank, whatever computes its steps, and the rows of a step by their adapters."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from services.executor.core.settings import AdapterDtype
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.model.adapters.files import LowRank

Int64Array = NDArray[np.int64]


@runtime_checkable
class AdapterHolder(Protocol):
    """The adapters in a rank's slots. Steps name slots (`StepPlan.adapters`); between steps slots get other ones."""

    def load(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        """Puts an adapter, cut for this rank, into `slot`, in place of what is there."""
        ...

    def drop(self, slot: int) -> None:
        """Empties `slot`: rows that name it are computed as those of no adapter."""
        ...


@runtime_checkable
class RoundingHolder(AdapterHolder, Protocol):
    """One that may keep factors in fewer bits than the model's data type has."""

    def keep_as(self, kind: AdapterDtype) -> None:
        """What the factors of adapters that are loaded from now on are kept as."""
        ...


@runtime_checkable
class ReservingHolder(AdapterHolder, Protocol):
    """One whose slots are made before they are used."""

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes `slots` for adapters of up to `max_rank`; called once, before any is loaded."""
        ...


def slots_of_rows(plan: StepPlan) -> Int64Array | None:
    """int64 [T]: the adapter slot of each row of the flat batch, -1 for none; None where no row has one."""
    of_sequences = as_int32(plan.adapters)
    if not len(of_sequences) or not (of_sequences >= 0).any():
        return None
    slots: Int64Array = np.repeat(of_sequences, as_int32(plan.query_lens)).astype(np.int64)
    return slots


def grouped_rows(slots: Int64Array) -> list[tuple[int, Int64Array]]:
    """(slot, its rows in ascending order) of each slot that `slots` int64 [T] names."""
    if not len(slots):
        return []
    order = np.argsort(slots, kind="stable")
    found, starts = np.unique(slots[order], return_index=True)
    parts = np.split(order, starts[1:])
    return [(int(slot), rows) for slot, rows in zip(found, parts, strict=True) if slot >= 0]

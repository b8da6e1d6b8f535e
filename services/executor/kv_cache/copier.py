"""Executes on one rank the copies of blocks that a plan carries; `block_copies.py` says why in this order."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor.engine.plan import StepPlan, as_int32
from services.executor.kv_cache.spill import SpillStore
from services.executor.kv_cache.store import KvStore


class Sum(Protocol):
    """What is needed of the ring's collectives."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Endpoint(Protocol):
    """What is needed of the rank's side of hand-overs (`services/executor/handover`)."""

    def obey(self, payload: bytes) -> None: ...

    def take(self, slot: int) -> bytearray: ...


class BlockCopier:
    """Between a rank's store and its spilled bytes. All ranks of a ring run the same plans in order."""

    def __init__(self, store: KvStore, spill: SpillStore | None, collectives: Sum) -> None:
        self._store = store
        self._spill = spill
        self._collectives = collectives
        self.endpoint: Endpoint | None = None
        """None: this ring hands nothing over."""

    def run(self, plan: StepPlan) -> list[int]:
        """Saves, compresses, adopts, restores. Returns the slots that some rank cannot restore: the same answer on
        every rank, for which they ask each other only where a plan restores something."""
        for block, slot in _pairs(plan.saves).tolist():
            self._spilled.save(slot, self._store.save(block))
        if plan.compressions:
            self._store.compress(_pairs(plan.compressions))
        self._hand_over(plan)
        if not plan.restores:
            return []
        restores = _pairs(plan.restores)
        lost = [0.0 if self._restore(slot, block) else 1.0 for slot, block in restores.tolist()]
        on_any = self._collectives.all_reduce(torch.tensor(lost, device=self._store.device))
        return [int(slot) for slot in restores[on_any.cpu().numpy() > 0, 0]]

    def _hand_over(self, plan: StepPlan) -> None:
        if self.endpoint is None:
            return
        for slot, block in _pairs(plan.adoptions).tolist():
            self._store.load(block, self.endpoint.take(slot))
        if plan.handover:
            self.endpoint.obey(plan.handover)

    def _restore(self, slot: int, block: int) -> bool:
        content = self._spilled.load(slot)
        if content is None:
            return False
        self._store.load(block, content)
        return True

    @property
    def _spilled(self) -> SpillStore:
        assert self._spill is not None, "a plan spills blocks, and the rank has nowhere to spill to"
        return self._spill


def _pairs(payload: bytes) -> NDArray[np.int32]:
    return as_int32(payload).reshape(-1, 2)

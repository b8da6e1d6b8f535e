"""Executes on one rank the copies of blocks that a plan carries; `block_copies.py` says why in this order."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor.engine.plan import StepPlan, as_int32
from services.executor.kv_cache.spill import Spill
from services.executor.kv_cache.store import KvStore


class Sum(Protocol):
    """What is needed of the ring's collectives."""

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Endpoint(Protocol):
    """What is needed of the rank's side of hand-overs (`services/executor/handover`)."""

    def obey(self, payload: bytes) -> None: ...

    def take(self, slot: int) -> bytearray: ...


class BlockCopier:
    """Between a rank's store and its spilled bytes. All ranks of a ring run the same plans in order."""

    def __init__(self, store: KvStore, spill: Spill | None, collectives: Sum) -> None:
        self._store = store
        self._spill = spill
        self._collectives = collectives
        self.endpoint: Endpoint | None = None
        """None: this ring hands nothing over."""

    def run(self, plan: StepPlan) -> list[int]:
        """Saves, adopts, restores. Returns the slots that some rank cannot restore: the same answer on
        every rank, for which they ask each other only where a plan restores what may be lost."""
        if plan.saves:
            self._spilled.save_blocks(self._store, _pairs(plan.saves).tolist())
        self._hand_over(plan)
        if not plan.restores:
            return []
        restores = _pairs(plan.restores)
        found = self._spilled.load_blocks(self._store, restores.tolist())
        if not self._spilled.loses:  # asking would wait for the device
            assert all(found), "a plan restores what was never saved"
            return []
        lost = np.array([0.0 if there else 1.0 for there in found], dtype=np.float32)
        if self._collectives.world_size > 1:
            flags = torch.from_numpy(lost).to(self._store.device)
            lost = self._collectives.all_reduce(flags).cpu().numpy()
        return [int(slot) for slot in restores[lost > 0, 0]]

    def _hand_over(self, plan: StepPlan) -> None:
        if self.endpoint is None:
            return
        for slot, block in _pairs(plan.adoptions).tolist():
            self._store.load(block, self.endpoint.take(slot))
        if plan.handover:
            self.endpoint.obey(plan.handover)

    @property
    def _spilled(self) -> Spill:
        assert self._spill is not None, "a plan spills blocks, and the rank has nowhere to spill to"
        return self._spill


def _pairs(payload: bytes) -> NDArray[np.int32]:
    return as_int32(payload).reshape(-1, 2)

"""Hidden states of the newest rows, by the slot of the KV cache that a row's token has gone to.

    row       ... t(p - 1)   t(p) ...        what reads a draft head's row at p: the state at the slot of p - 1
    slot           s            s + 1        or, where a block begins at p, the last one of the block before

Nothing of it is in a plan: a plan's slots and block tables say where the token before a row is. What is not known any
more, or never was (a block that was restored), is zeros: it may cost a proposal, and no text.
"""

import numpy as np
import torch
from torch import Tensor

from services.executor.core.step_plan import Int32Array
from services.executor.platforms.base import sent


class RowStates:
    """As many as there is room for, the newest."""

    def __init__(self, slots: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`slots`: of all KV blocks, full ones that are compressed too; `capacity`: rows that are kept, each `width`
        values."""
        self._rows = torch.zeros((capacity, width), dtype=dtype, device=device)
        self._row_of = np.full(slots, -1, np.int32)  # by slot; -1: none
        self._slot_of = np.full(capacity, -1, np.int32)
        self._next = 0

    def keep(self, slots: Int32Array, states: Tensor) -> None:
        """`states` [n, width] of the tokens at `slots`, which differ from each other; the last ones where there are
        more than are kept."""
        capacity = len(self._slot_of)
        slots, states = slots[-capacity:], states[-capacity:]
        rows = (self._next + np.arange(len(slots))) % capacity
        replaced = self._slot_of[rows]
        held = replaced[replaced >= 0]
        current = self._row_of[held] == rows[replaced >= 0]
        self._row_of[held[current]] = -1
        self._slot_of[rows], self._row_of[slots] = slots, rows
        self._rows[self._to_device(rows)] = states.to(self._rows)
        self._next = int(self._next + len(slots)) % capacity

    def at(self, slots: Int32Array) -> Tensor:
        """[n, width] of the tokens at `slots`; zeros for those that are not known, and for -1."""
        rows = np.where(slots >= 0, self._row_of[slots], -1)
        found = self._rows[self._to_device(np.maximum(rows, 0))]
        return found.masked_fill_(self._to_device(rows < 0).unsqueeze(-1), 0)

    def copy(self, sources: Int32Array, targets: Int32Array) -> None:
        """Keeps what is known at the slots `sources` as that of `targets` too."""
        known = self._row_of[sources] >= 0
        if known.any():
            self.keep(targets[known], self.at(sources[known]))

    def forget(self, slots: Int32Array) -> None:
        self._row_of[slots] = -1

    def _to_device(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return sent(np.ascontiguousarray(values), self._rows.device)

"""Whether interactive requests run on a host: one word per ring, in shared memory, that trainers look at.

    slot 0: interactive sequences of ring a    (its leader)
    slot 1: ...                                (of ring b)    ──▶ a trainer yields while any is above 0

The supervisor gives a ring its slot, and clears it when the ring has ended: a leader that died keeps nobody waiting.
"""

import ctypes
from pathlib import Path
from typing import Annotated, Any

from services.executor.ipc.table import map_tables, table

SLOTS = 64
"""Rings of a host at a time."""


@table
class _Slot(ctypes.Structure):
    interactive: int
    """Sequences of the lanes interactive and recovery that wait or run."""


@table
class _Page(ctypes.Structure):
    slots: Annotated[Any, _Slot * SLOTS]


class HostActivity:
    def __init__(self, path: Path, *, create: bool = False) -> None:
        (self._page,) = map_tables(path, _Page, create=create)
        self._slots = list(self._page.slots)

    def set(self, slot: int, interactive: int) -> None:
        """Written by the leader of the ring that has the slot, and by the supervisor after its end."""
        self._slots[slot].interactive = interactive

    def interactive(self, slot: int) -> int:
        """What the slot says."""
        return int(self._slots[slot].interactive)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not any(slot.interactive for slot in self._slots)


class ActivityPage:
    """The page of a host, and who has which slot of it: its supervisor's."""

    def __init__(self, path: Path) -> None:
        """Made anew, all zeros."""
        self.path = path
        self._page = HostActivity(path, create=True)
        self._free = list(range(SLOTS))

    def take(self) -> int | None:
        """A slot for a ring; None: all are taken, and trainers do not hear of its requests."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        """Its ring has ended, to the last process."""
        self._page.set(slot, 0)
        self._free.append(slot)

"""Whether interactive requests run on a host: one word per ring, in shared memory.

    slot 0: interactive sequences of ring a    (its leader)
    slot 1: ...                                (of ring b)    ──▶ trainers are suspended while any is above 0
    armed:  trainers run                       (supervisor)   ──▶ a leader tells it of the next request, by its pipe

The supervisor gives a ring its slot, and clears it when the ring has ended: a leader that died keeps nobody waiting. It
arms the page while it is idle; the leader that has told it disarms it. So there is one message for each time that
trainers are suspended, and none where there are no trainers.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from services.executor.ipc.table import map_tables, table

SLOTS = 64  # rings of a host at a time


@table
class _Slot(ctypes.Structure):
    interactive: int  # sequences of the lanes interactive and recovery that wait or run


@table
class _Page(ctypes.Structure):
    armed: int  # whether the supervisor is to be told of a request
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

    @property
    def is_armed(self) -> bool:
        """Whether the supervisor is to be told of a request."""
        return bool(self._page.armed)

    def arm(self) -> None:
        """By the supervisor: from now on the next request is told, once."""
        self._page.armed = 1

    def disarm(self) -> None:
        """By a leader, after it has told it: one that dies before leaves the page armed."""
        self._page.armed = 0


class ActivityPage(HostActivity):
    """The page of a host, and who has which slot of it: its supervisor's."""

    def __init__(self, path: Path, on_request: Callable[[], None] = lambda: None) -> None:
        """Made anew, all zeros. `on_request`: a leader says that somebody waits for an answer."""
        super().__init__(path, create=True)
        self.path = path
        self.on_request = on_request
        self._free = list(range(SLOTS))

    def take(self) -> int | None:
        """A slot for a ring; None: all are taken, and trainers run beside its requests."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        """Its ring has ended, to the last process; what it has told last may have been lost with it."""
        self.set(slot, 0)
        self.arm()
        self._free.append(slot)

"""Copies of blocks that the ranks must make before they compute the next step.

Decided by the leader between two plans, executed by every rank in this order:

    1. saves         block ──▶ spill slot     what is evicted, before its id is written again
    2. adoptions     landing slot ──▶ block   what another ring has given (`handover/arrivals.py`)
    3. restores      spill slot ──▶ block     what the step is going to read
    4. the forward pass, which in each layer writes hot blocks, compresses those that it fills, and attends

Source of a save is only what earlier plans have written; so the order makes it safe to hand an id or a slot
out again in the very plan that saves what it held.
"""

from collections.abc import KeysView
from typing import NamedTuple

Pairs = list[tuple[int, int]]


class Copies(NamedTuple):
    """(from, to) pairs, in the order of execution."""

    saves: Pairs
    restores: Pairs


class PendingCopies:
    """What the next plan will carry."""

    def __init__(self) -> None:
        self._saves: dict[int, int] = {}
        self._restores: Pairs = []

    @property
    def saves(self) -> KeysView[int]:
        """The slots that are going to be written, oldest first."""
        return self._saves.keys()

    @property
    def restores(self) -> int:
        return len(self._restores)

    def save(self, block: int, slot: int) -> None:
        """A slot that was to be written already has been given away since: the later save counts."""
        self._saves.pop(slot, None)
        self._saves[slot] = block

    def cancel_save(self, slot: int) -> None:
        del self._saves[slot]

    def restore(self, slot: int, block: int) -> None:
        self._restores.append((slot, block))

    def take(self) -> Copies:
        """All of them, once."""
        saves = [(block, slot) for slot, block in self._saves.items()]
        copies = Copies(saves, self._restores)
        self._saves, self._restores = {}, []
        return copies

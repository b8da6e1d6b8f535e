"""Which LoRA adapters a ring's ranks hold in memory, and who may have a place in the batch for it. No clock, no I/O.

    slot        0      1      2      3          every rank has the same adapters in the same slots
    holds       ab     cd     ef     -
    users       2      0      1      0          running sequences that are computed with it
    claimed                   by gh             nobody joins `ef` until `gh` has had its slot

A sequence takes the slot that holds its adapter, or else the one that nobody uses for the longest time; the next plan
then has the adapter read into it (`StepPlan.adapter_loads`). Where every slot is in use, the sequence waits and claims
the slot with the fewest users: others whose adapter is in it wait too, behind it. Those whose slot is not claimed pass
by, so the ring stays full while one adapter makes way for another.

A step reads `LOADS_PER_STEP` adapters at most; who needs a further one is admitted with the next step.

Everybody gets a turn: the fewest users of any slot never grow while somebody waits for one, since who waits longest
claims that very slot, and running sequences end. With fewer slots than adapters in use they take turns; with enough
nobody ever waits. Claims are made anew for every step, so that nothing is left of one whose sequence was cancelled.
"""

from collections.abc import Iterable

NO_SLOT = -1
LOADS_PER_STEP = 2  # adapters that one step reads at most: everybody's next token waits for it


class _Slot:
    __slots__ = ("digest", "used", "users")

    def __init__(self) -> None:
        self.digest = ""
        self.users = 0
        # When it was last taken or released, in a count of these; the least is the least recently used.
        self.used = 0


class AdapterSlots:
    """Slots of one ring. `take` only for whom `SlotClaims` (`features/adapters.py`) admits."""

    def __init__(self, slots: int) -> None:
        self.empty = True  # whether no sequence has had an adapter so far: then steps need none of this
        self.loads = 0  # adapters that were given a slot
        self.evictions = 0  # of these, those that took it from another
        self._slots = [_Slot() for _ in range(slots)]
        self._by_digest: dict[str, int] = {}
        self._count = 0
        self._loads: dict[int, str] = {}

    @property
    def digests(self) -> list[str]:
        """Of the adapters that are in slots, or on their way there."""
        return sorted(self._by_digest)

    @property
    def pending(self) -> list[str]:
        """Of those that the next plan has read."""
        return list(self._loads.values())

    def holds(self, digest: str) -> bool:
        """Whether the adapter is in a slot, or on its way there."""
        return digest in self._by_digest

    def users(self, slot: int) -> int:
        return self._slots[slot].users

    def find(self, digest: str, claimed: Iterable[int] = ()) -> int:
        """The slot that `take` would give; `NO_SLOT` where all are in use. None of `claimed`."""
        held = self._by_digest.get(digest, NO_SLOT)
        if held != NO_SLOT:
            return NO_SLOT if held in claimed else held
        unused = [at for at, slot in enumerate(self._slots) if not slot.users and at not in claimed]
        return min(unused, key=self._age, default=NO_SLOT)

    def fewest(self, claimed: Iterable[int]) -> int:
        """The slot with the fewest users, of equals the least recently used; none of `claimed`. `NO_SLOT`: there is
        none."""
        others = [at for at in range(len(self._slots)) if at not in claimed]
        return min(others, key=lambda at: (self.users(at), self._age(at)), default=NO_SLOT)

    def take(self, digest: str) -> int:
        """One more running sequence has this adapter; its slot."""
        at = self.find(digest)
        assert at != NO_SLOT, "nobody may take a slot where all are in use"
        slot = self._slots[at]
        if slot.digest != digest:
            self.loads += 1
            self.evictions += self._by_digest.pop(slot.digest, None) is not None
            slot.digest, self._by_digest[digest], self._loads[at] = digest, at, digest
        slot.users += 1
        self.empty = False
        self._touch(slot)
        return at

    def release(self, at: int) -> None:
        """One running sequence less has the adapter in this slot; it stays there while nobody needs the slot."""
        slot = self._slots[at]
        assert slot.users > 0, "nobody uses the slot"
        slot.users -= 1
        self._touch(slot)

    def take_loads(self) -> dict[int, str]:
        """{slot: digest} of what is to be read before the next step; each is given out once."""
        loads, self._loads = self._loads, {}
        return loads

    def check(self, running: Iterable[tuple[int, str]]) -> None:
        """Raises AssertionError where an invariant does not hold. `running`: slot and digest of each sequence that has
        a slot."""
        users = [0] * len(self._slots)
        for at, digest in running:
            assert self._slots[at].digest == digest, "a slot was replaced that is in use"
            users[at] += 1
        assert users == [slot.users for slot in self._slots], "users of slots are miscounted"
        held = {slot.digest: at for at, slot in enumerate(self._slots) if slot.digest}
        assert held == self._by_digest, "an adapter is in two slots, or in none that is known"

    def _age(self, at: int) -> int:
        return self._slots[at].used

    def _touch(self, slot: _Slot) -> None:
        self._count += 1
        slot.used = self._count

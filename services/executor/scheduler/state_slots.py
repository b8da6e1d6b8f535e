"""Recurrent state: which sequence has which slot, and what is kept of it. No clock, no I/O.

    slots    places                  num_states - places                 draft_states
             of running sequences    of snapshots that are being made    behind rows whose next one is a draft

A slot has a sequence's state after the last token that was computed, and cannot be rolled back. So a sequence begins
with zeros, or with a snapshot: a copy of the state after a full block, which is kept in KV blocks.

    drafts      step   [ t | d1 d2 d3 ]     its state behind t, d1, d2 goes to a slot each; behind d3 it is its own
                d2 is wrong: that behind d1 is the sequence's slot from then on, and its own is free for drafts

So a rejected draft costs no copy but those that the step makes anyway, and rows without drafts none.

    snapshot    wanted ──▶ taken ──▶ saved ──▶ cached           found by `BlockAllocator.match_state`
    in plan n:  after a row, to a snapshot slot
    in n+1, n+2:           the first that is made when step n is over: from the slot to blocks, and the slot is free
    then:                             the blocks are in the prefix index, as cached as any other

Whatever goes wrong costs the snapshot and nothing else: no slot is free, no blocks are unused, the step that was to
take it has failed, its sequence was cancelled before its tokens were known.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import to_bytes
from services.executor.kv_cache.allocator import BlockAllocator
from services.executor.kv_cache.prefix_index import state_keys
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.sequence import Sequence, SequenceState

# Blocks from one snapshot to the next at least and at most: within that, as many as a snapshot takes itself.
STRIDE = 4, 128

# (sequence, position of its first token, tokens, drafts behind them), in the order of a flat batch.
Rows = Seq[tuple[Sequence, int, int, int]]


class StateSnapshot(NamedTuple):
    sequence: Sequence
    blocks: int  # full blocks before it
    slot: int


class Save(NamedTuple):
    snapshot: StateSnapshot
    table: list[int]  # the blocks that it goes to


class Drafted(NamedTuple):
    """A sequence whose drafts a step checks."""

    sequence: Sequence
    first: int  # position of the first draft
    slots: list[int]  # where its state before each of the drafts is


class _Step(NamedTuple):
    """What a plan that was sent brings about."""

    snapshots: list[StateSnapshot]
    saves: list[Save]
    drafted: list[Drafted]


class StateSlots:
    def __init__(self, spec: EngineSpec, settings: BatchSettings, allocator: BlockAllocator) -> None:
        self.total = spec.num_states  # 0: the model keeps no such state, and nothing here is of use
        self.places = places(spec, settings)
        self._allocator = allocator
        self._size = spec.block_size
        self._parts = spec.state_blocks
        self._stride = min(max(self._parts, STRIDE[0]), STRIDE[1])
        self._free = list(range(self.places - 1, -1, -1))
        self._spare = list(range(spec.num_states - 1, self.places - 1, -1))
        self._draft_states = spec.draft_states if spec.num_states else 0
        # Free slots for states behind drafts.
        self._behind = list(range(self.total + self._draft_states - 1, self.total - 1, -1))
        self._ready: list[StateSnapshot] = []  # taken, to be saved by the next plan
        self._steps: deque[_Step] = deque()  # those under way, the oldest first
        self._loads: list[Sequence] = []  # whom the step under way gives the state that they begin with

    # --- slots -----------------------------------------------------------------------------------

    @property
    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._free) or not self.total

    def admit(self, sequence: Sequence) -> None:
        if self.total:
            sequence.state_slot = self._free.pop()

    def free(self, sequence: Sequence) -> None:
        """Nothing reads or writes the sequence's slot any more."""
        if sequence.state_slot >= 0:
            self._free.append(sequence.state_slot)
            sequence.state_slot = -1
        sequence.snapshots = []

    # --- what a sequence begins with -------------------------------------------------------------

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def load(self, sequence: Sequence) -> None:
        """The step that is being planned loads `sequence.snapshot`, which has been restored, before it computes."""
        if sequence not in self._loads:
            self._loads.append(sequence)
            sequence.in_flight = True

    def cached_blocks(self, sequence: Sequence, limit: int) -> int:
        """The most blocks, `limit` at most, that are in the cache of the sequence's tokens with the state behind them;
        0 where that is not more than it has computed."""
        tokens, allocator = sequence.chain, self._allocator
        first = end = sequence.num_computed // self._size
        while end < min(limit, len(tokens)) and allocator.find(tokens, end) is not None:
            end += 1
        return next((at for at in range(end, first, -1) if self._found(sequence, at)), 0)

    def _found(self, sequence: Sequence, blocks: int) -> list[int]:
        """The blocks of the snapshot behind so many of the sequence's; empty where they are not all there."""
        return self._allocator.find_state(sequence.chain.digest(blocks - 1), self._parts)

    def begin_with(self, sequence: Sequence, blocks: int) -> None:
        """Takes the snapshot behind so many of the sequence's blocks, as `known` has it, and has it loaded."""
        found = self._found(sequence, blocks)
        self._allocator.share(found)
        sequence.snapshot.extend(found)
        sequence.snapshots.append(blocks)
        self.load(sequence)

    def is_coming(self, sequence: Sequence, limit: int, others: Iterable[Sequence]) -> bool:
        """Whether a snapshot is about to be made, of what one of `others` computes or has computed, that the sequence
        may go on from, with `limit` blocks at most."""
        if not self.total - self.places:
            return False
        done = sequence.num_computed // self._size
        if any(done < one.blocks <= limit and _agree(sequence, one.sequence, one.blocks) for one in self._ready):
            return True
        for other in others:
            at = self._next(other, max(done, other.num_computed // self._size))
            if at <= limit and _agree(sequence, other, at):
                return True
        return False

    # --- snapshots -------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a plan should be sent, be there something to compute or not."""
        return bool(self._ready)

    def plan(self, rows: Rows, room: int) -> dict[str, bytes]:
        """What the plan that is about to be sent, and computes `rows`, says of recurrent state. `room`: full blocks
        that nobody needs, for snapshots."""
        saves = self._save(room)
        taken = self._take(rows)
        copies = [(row, snapshot.slot) for row, snapshot in taken]
        drafted = self._keep_before_drafts(rows, copies)
        self._steps.append(_Step([snapshot for _, snapshot in taken], saves, drafted))
        return {
            "state_slots": to_bytes([sequence.state_slot for sequence, _, _, _ in rows]),
            "state_snapshots": to_bytes(copies),
            "state_saves": _flat((save.snapshot.slot, *save.table) for save in saves),
            "state_loads": _flat((sequence.state_slot, *sequence.snapshot) for sequence in self._loads),
        }

    def _take(self, rows: Rows) -> list[tuple[int, StateSnapshot]]:
        """Snapshots that a step takes, and behind which rows, as far as there are slots: those where prompts end, or
        part, before others."""
        wanted: list[tuple[bool, int, Sequence, int]] = []
        row = 0
        for sequence, start, length, drafts in rows:
            length += drafts
            first, last = start // self._size, (start + length) // self._size
            if first < last:
                ends = self._ends(sequence)
                wanted += [
                    (at not in ends, row + at * self._size - 1 - start, sequence, at)
                    for at in self._borders(sequence, first, last)
                    if not self._is_known(sequence, at)
                ]
            row += length
        wanted.sort(key=lambda one: one[0])
        count = min(len(wanted), len(self._spare))
        return [(row, StateSnapshot(sequence, at, self._spare.pop())) for _, row, sequence, at in wanted[:count]]

    def _keep_before_drafts(self, rows: Rows, copies: list[tuple[int, int]]) -> list[Drafted]:
        """Adds to `copies` where the state before each draft goes: behind which row, and to which slot."""
        found, row = [], 0
        for sequence, start, length, drafts in rows:
            if drafts:
                slots = [self._behind.pop() for _ in range(drafts)]
                copies += zip(range(row + length - 1, row + length - 1 + drafts), slots, strict=True)
                found.append(Drafted(sequence, start + length, slots))
            row += length + drafts
        return found

    def _borders(self, sequence: Sequence, first: int, last: int) -> Iterator[int]:
        """Numbers of blocks in (first, last] behind which there should be snapshots, the largest first."""
        ends = self._ends(sequence)
        return (at for at in range(last, first, -1) if at % self._stride == 0 or at in ends)

    def _next(self, sequence: Sequence, blocks: int) -> int:
        """The first of these numbers above `blocks`."""
        regular = (blocks // self._stride + 1) * self._stride
        return min(at for at in (*self._ends(sequence), regular) if at > blocks)

    def _ends(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks of its prompt that an equal prompt can reuse, and those that it shares with an earlier one."""
        return (sequence.prompt_tokens - 1) // self._size, sequence.alike

    def _is_known(self, sequence: Sequence, blocks: int) -> bool:
        if not self._is_named(sequence, blocks):
            return False
        keys = state_keys(sequence.chain.digest(blocks - 1), self._parts)
        return all(self._allocator.knows(key.digest) for key in keys)

    def _is_named(self, sequence: Sequence, blocks: int) -> bool:
        """Whether all tokens of so many of its blocks are known, and hence their digests."""
        if len(sequence.chain) < blocks <= len(sequence.tokens) // self._size:
            sequence.chain.grow()
        return blocks <= len(sequence.chain)

    def _save(self, room: int) -> list[Save]:
        """Finds blocks for what was taken, and gives the slots back: the plan saves before it computes."""
        ready, self._ready = self._ready, []
        saves = []
        for snapshot in ready:
            self._spare.append(snapshot.slot)
            if self._parts <= room and not self._is_known(snapshot.sequence, snapshot.blocks):
                room -= self._parts
                saves.append(Save(snapshot, self._allocator.allocate_full_blocks(self._parts)))
        return saves

    # --- the end of a step -----------------------------------------------------------------------

    def close(self, now: float, *, copied: bool = True, computed: bool = True) -> None:
        """The oldest step is over; `copied`: nothing that it should have restored is missing; `computed`: what it has
        computed counts."""
        if not self._steps:
            return
        step = self._steps.popleft()
        for save in step.saves:
            self._keep(save, now)
        if copied:  # else the next plan loads them
            for sequence in self._loads:
                request = sequence.request
                self._allocator.release(sequence.snapshot, request.session, now, keep=request.cache_ttl)
                del sequence.snapshot[:]
        for sequence in self._loads:
            sequence.in_flight = False
        self._loads = []
        for one in step.drafted:
            self._settle(one, computed)
        for snapshot in step.snapshots:
            if computed and self._is_right(snapshot):
                self._ready.append(snapshot)
            else:
                self._spare.append(snapshot.slot)

    def _settle(self, drafted: Drafted, computed: bool) -> None:
        """Has the sequence go on behind the drafts that were right: where not all were, in another slot."""
        sequence, first, slots = drafted
        right = sequence.num_computed - first
        if computed and sequence.state_slot >= 0 and right < len(slots):
            sequence.state_slot, slots[right] = slots[right], sequence.state_slot
        self._behind += slots

    def _is_right(self, snapshot: StateSnapshot) -> bool:
        """Whether it was taken behind tokens that are the sequence's, and not behind a draft that was wrong. A sequence
        that has no slot any more took no token from its last step."""
        sequence, blocks, _ = snapshot
        if sequence.state_slot >= 0 and blocks * self._size > sequence.num_computed:
            return False
        return self._is_named(sequence, blocks)

    def _keep(self, save: Save, now: float) -> None:
        """The blocks hold the snapshot by now: it can be found."""
        sequence, blocks, _ = save.snapshot
        keys = state_keys(sequence.chain.digest(blocks - 1), self._parts)
        sealed = [self._allocator.seal(block, key) for block, key in zip(save.table, keys, strict=True)]
        self._allocator.release(sealed, sequence.request.session, now, keep=sequence.request.cache_ttl)
        if sequence.state is SequenceState.RUNNING:
            sequence.snapshots.append(blocks)

    def with_snapshots(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """(what is cached of its snapshots but the last, its table with the last behind the block that it follows),
        with one more reference to each block of a snapshot. A session comes back to the last, so that alone is kept
        for it; and it is evicted behind what it is of no use to."""
        found = [(at, self._found(sequence, at)) for at in sorted(set(sequence.snapshots))]
        found = [(at, blocks) for at, blocks in found if blocks and at <= sequence.num_sealed]
        if not found:
            return [], sequence.table.tolist()
        for _, blocks in found:
            self._allocator.share(blocks)
        last, kept = found.pop()
        table = [*sequence.table[:last], *kept, *sequence.table[last:]]
        return [block for _, blocks in found for block in blocks], table

    # --- what others see -------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.total - len(self._free) - len(self._spare)

    @property
    def held(self) -> list[list[int]]:
        """Blocks that snapshots are being saved to, as tables. For checks."""
        return [save.table for step in self._steps for save in step.saves]

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError where a slot is leaked, or in use twice. `running`: all who have one."""
        if not self.total:
            return
        held = [sequence.state_slot for sequence in running]
        assert len(held) + len(self._free) == self.places, "a sequence's slot is leaked"
        made = [snapshot.slot for snapshot in chain(self._ready, *(step.snapshots for step in self._steps))]
        assert len(made) + len(self._spare) == self.total - self.places, "a snapshot's slot is leaked"
        behind = [slot for step in self._steps for one in step.drafted for slot in one.slots]
        every = sorted((*held, *self._free, *made, *self._spare, *behind, *self._behind))
        assert every == list(range(self.total + self._draft_states)), "a slot is leaked, or in use twice"


def places(spec: EngineSpec, settings: BatchSettings) -> int:
    """Slots for sequences, hence sequences that run at once."""
    return min(spec.num_states, settings.max_sequences, max(1, spec.num_states - 1))


def _agree(one: Sequence, other: Sequence, blocks: int) -> bool:
    """Whether the sequences' first so many blocks, which are full, hold the same."""
    full = min(len(one.chain), len(other.chain))
    return 0 < blocks <= full and one.chain.digest(blocks - 1) == other.chain.digest(blocks - 1)


def _flat(rows: Iterable[Seq[int]]) -> bytes:
    return to_bytes(list(chain.from_iterable(rows)))

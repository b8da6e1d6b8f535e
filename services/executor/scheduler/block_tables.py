"""The KV side of continuous batching: which blocks a sequence has, gets, shares and gives back.

A running sequence's table grows as it is computed, a chunk at a time. What its tokens will still need is
promised to it: nobody is admitted into that room.

    tokens   ................................ | ..............
    table    [ sealed | sealed | writable ]     missing: promised, not taken yet
    quantized                  [ block ]        where full blocks are compressed: what the writable one will be

What a token reads depends on its position alone (docs/adr/0024): the blocks before its own as they are kept, its own
as it is written. So a step that fills a block needs both of its ids, drafts included, and where either cannot be had
there is no room for the step's tokens.

Only running sequences hold blocks.

Where the model keeps recurrent state (`state_slots.py`), a known beginning ends where a snapshot of it is known too.
"""

from array import array
from collections.abc import Collection, Iterable
from typing import NamedTuple

from msgspec import structs

from services.executor.core.engine import EngineSpec, SpilledBlock
from services.executor.kv_cache.allocator import BlockAllocator
from services.executor.kv_cache.block_pool import Copies
from services.executor.kv_cache.offload_tiers import SpillTiers
from services.executor.kv_cache.prefix_index import BlockKey, state_key
from services.executor.kv_transfer.exchange import Exchange
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.state_slots import StateSlots, places
from shared.messages.debugging import AllocatorDump

DISK_COST = 4  # what a restore from disk counts for, against one from host memory


class PrefixMatch(NamedTuple):
    """Where that of a sequence is: block ids, and ~slot of those that are spilled."""

    blocks: list[int]
    snapshot: list[int] = []  # of the recurrent state behind them
    alike: int = 0  # blocks that are known, be there a snapshot behind the last one or not


class BlockTables:
    """Fills, grows and frees the block tables of a batcher's sequences. No clock, no I/O."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings, root: bytes = b"") -> None:
        """`root`: where the sequences' chains begin."""
        self._spec = spec
        self._size = spec.block_size
        self._compresses = spec.num_quantized > 0
        self._tiers = SpillTiers(spec.num_host, spec.num_disk)
        self._allocator = BlockAllocator(
            spec.num_blocks,
            spec.block_size,
            spec.num_quantized,
            self._tiers,
            settings.session_ttl,
            # What a step computes, and the snapshots that it saves, may evict as much, and saving a block is cheap
            # against computing it; so this bounds only the burst of a long sequence that makes room for all it
            # restores.
            saves_per_step=spec.copies_per_step
            + settings.max_batch_tokens // spec.block_size
            + (spec.num_states - places(spec, settings)) * spec.state_blocks,
        )
        self.states = StateSlots(spec, settings, self._allocator)
        self.exchange = Exchange(self._allocator, root, spec.copies_per_step)
        # (sequence, position as in its `restoring`, slot): what the step under way restores.
        self._restores: list[tuple[Sequence, int, int]] = []
        self._cost = 0
        self._blocked = (-1, -1)
        self._now = 0.0
        self.cached_tokens = 0  # prompt tokens that were found in the cache

    def recover(self, blocks: Iterable[SpilledBlock]) -> int:
        """The ring starts with these on disk (`Engine.recovered`); returns how many can be found."""
        return self._tiers.recover((block.slot, BlockKey(*block.key)) for block in blocks)

    # --- room ------------------------------------------------------------------------------------

    def _needed(self, tokens: int) -> int:
        """Blocks of those for full ones that so many tokens need."""
        return tokens // self._size if self._compresses else -(-tokens // self._size)

    def missing(self, sequence: Sequence) -> int:
        """Blocks, of those for full ones, that the sequence's tokens need and it does not have yet."""
        held = sequence.num_sealed + len(sequence.quantized) if self._compresses else len(sequence.table)
        return max(0, self._needed(len(sequence.tokens)) - held)

    def free_blocks(self, running: Iterable[Sequence]) -> int:
        """Blocks for full ones that can be had at once and are not promised to a running sequence."""
        return max(0, self._allocator.available_full_blocks - sum(self._missing(running)))

    def _missing(self, running: Iterable[Sequence]) -> list[int]:
        """As `missing`, of those that do; for all that run, and often: without a call for each."""
        size = self._size
        if self._compresses:
            missing = [len(s.tokens) // size - s.num_sealed - len(s.quantized) for s in running]
        else:
            missing = [-(-len(s.tokens) // size) - len(s.table) for s in running]
        return [blocks for blocks in missing if blocks > 0]

    def could_allocate(self, sequence: Sequence, running: Iterable[Sequence], lent: Iterable[Sequence]) -> bool:
        """Whether there would be room for a waiting sequence, were the sequences `lent` gone."""
        freed = sum(self._needed(len(s.tokens)) for s in lent)
        return self.free_blocks(running) + freed >= self.missing(sequence)

    def can_allocate(self, sequence: Sequence, running: Collection[Sequence]) -> PrefixMatch | None:
        """What is known of a waiting sequence's beginning; None: no room for now.

        Beside others it leaves a block for each of them, so that their decodes do not push it out at once.
        """
        attempt = (sequence.arrival, self._allocator.room_version)
        if (running and attempt == self._blocked) or not self.states.has_place:
            return None
        found = self._known(sequence)
        if running and not self._has_room(sequence, found, running):
            self._blocked = attempt
            return None
        return found

    def _known(self, sequence: Sequence) -> PrefixMatch:
        limit = self._shareable(sequence)
        if self.states.total:
            return PrefixMatch(*self._allocator.match_state(sequence.chain, limit, self._spec.state_blocks))
        return PrefixMatch(self._allocator.match(sequence.chain, limit))

    def _has_room(self, sequence: Sequence, found: PrefixMatch, running: Collection[Sequence]) -> bool:
        room, writable = self._allocator.room_after([*found.blocks, *found.snapshot])
        needed = self.missing(sequence) - sum([place >= 0 for place in found.blocks])
        needed += sum([place < 0 for place in found.snapshot])
        size, missing = self._size, self._missing(running)
        writing = len(missing)
        if self._compresses:
            writing = sum([len(s.tokens) > len(s.table) * size for s in running])
        return room >= needed + sum(missing) + self.reserve(len(running)) and writable > writing

    def _shareable(self, sequence: Sequence) -> int:
        """Blocks that may be shared or restored: the last token is computed in any case, for its logits."""
        return (len(sequence.tokens) - 1) // self._size

    # --- tables ----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, found: PrefixMatch) -> None:
        """Gives a sequence its known beginning, from `can_allocate`."""
        blocks, snapshot, sequence.alike = found
        taken = self._allocator.take([*blocks, *snapshot])
        sequence.table.extend(taken[: len(blocks)])
        sequence.snapshot.extend(taken[len(blocks) :])
        if min(blocks, default=0) < 0 or min(snapshot, default=0) < 0:
            sequence.restoring = {position: ~place for position, place in enumerate(blocks) if place < 0}
            sequence.restoring |= {~part: ~place for part, place in enumerate(snapshot) if place < 0}
        self.states.admit(sequence)
        if snapshot:
            sequence.snapshots.append(len(blocks))
        self._skip(sequence, len(blocks))

    def _skip(self, sequence: Sequence, blocks: int) -> None:
        """`blocks` more blocks need not be computed."""
        sequence.num_sealed += blocks
        if sequence.followed == sequence.num_computed:  # what is cached counts as computed by both models
            sequence.followed += blocks * self._size
        sequence.num_computed += blocks * self._size
        if not sequence.preempted:
            known = min(sequence.cached_tokens + blocks * self._size, sequence.prompt_tokens)
            self.cached_tokens += known - sequence.cached_tokens
            sequence.cached_tokens = known

    def share_more(self, sequence: Sequence) -> None:
        """Takes over what others have computed of the sequence's tokens since it was admitted."""
        if self.states.total:
            self._share_with_state(sequence)
            return
        if sequence.num_computed % self._size:
            return
        while sequence.num_sealed < self._shareable(sequence):
            block = self._allocator.find(sequence.chain, sequence.num_sealed)
            if block is None:
                return
            self._share(sequence, [block])

    def _share(self, sequence: Sequence, blocks: list[int]) -> None:
        """Writable blocks are there, and empty, when a step that was to fill them has failed."""
        self._shorten(sequence, sequence.num_sealed, 0)
        self._allocator.share(blocks)
        sequence.table.extend(blocks)
        self._skip(sequence, len(blocks))
        self._blocked = (-1, -1)

    def _share_with_state(self, sequence: Sequence) -> None:
        """Nothing may be skipped but to a snapshot."""
        known = 0 if sequence.snapshot else self.states.cached_blocks(sequence, self._shareable(sequence))
        if known:
            found = (self._allocator.find(sequence.chain, at) for at in range(sequence.num_sealed, known))
            self.states.begin_with(sequence, known)
            # What its last block has, that one has too.
            sequence.num_computed = sequence.num_sealed * self._size
            sequence.followed = min(sequence.followed, sequence.num_computed)
            self._share(sequence, [block for block in found if block is not None])

    def is_being_computed(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether one of `others`, all more urgent, is about to compute or restore the sequence's next
        block, which nobody has yet; or a snapshot that it can go on from."""
        if self.states.total:
            return self.states.is_coming(sequence, self._shareable(sequence), others)
        position = sequence.num_sealed
        if sequence.num_computed % self._size or position >= self._shareable(sequence):
            return False
        digest = sequence.chain.digest(position)
        return any(position < len(other.chain) and other.chain.digest(position) == digest for other in others)

    def ensure_slots(self, sequence: Sequence, tokens: int) -> bool:
        """Sees that the sequence's first `tokens` tokens can be computed: that there are blocks that they are written
        to, and blocks for those that they fill. False where blocks run out."""
        allocator = self._allocator
        writable, quantized = self._lacks(sequence, tokens)
        while writable > allocator.available_writable or quantized > allocator.available_full_blocks:
            if not self.exchange.make_way():
                self._extend_in_part(sequence, tokens)
                return False
        sequence.table.extend(allocator.allocate(writable))
        if quantized:
            sequence.quantized.extend(allocator.allocate_full_blocks(quantized))
        return True

    def slots(self, sequence: Sequence) -> int:
        """How many of its first tokens can be computed with the blocks that it has."""
        written = len(sequence.table) * self._size
        if not self._compresses:
            return written
        return min(written, (sequence.num_sealed + len(sequence.quantized) + 1) * self._size - 1)

    def ensure_slots_ahead(self, successors: Collection[tuple[Sequence, int]]) -> bool:
        """As `ensure_slots`, of the tokens at these positions, each the one behind what the step under way computes of
        its sequence. False where blocks run out; then nothing has changed."""
        size, compresses = self._size, self._compresses
        lacking = [
            (s, at + 1)
            for s, at in successors
            if len(s.table) * size <= at or (compresses and (at + 1) // size > s.num_sealed + len(s.quantized))
        ]
        return self._extend(lacking)

    def ensure_draft_slots(self, sequence: Sequence, drafts: int, running: Collection[Sequence]) -> int:
        """Makes room for up to `drafts` tokens behind the sequence's own, in blocks that nobody needs.

        Returns for how many there is room. `free_unused` gives the blocks back.
        """
        wanted = len(sequence.tokens) + drafts
        while (covered := self.slots(sequence)) < wanted:
            if not self.free_blocks(running) or not self._extend([(sequence, covered + 1)]):
                break
        return max(0, min(drafts, covered - len(sequence.tokens)))

    def free_unused(self, sequences: Iterable[Sequence]) -> None:
        """Gives back the blocks behind those of the sequences' tokens."""
        size = self._size
        for sequence in sequences:  # after every step, of every one: nearly always there is nothing to do
            tokens = len(sequence.tokens)
            if sequence.quantized or (len(sequence.table) - 1) * size >= tokens:
                self._shorten(sequence, -(-tokens // size), tokens // size - sequence.num_sealed)

    def _extend(self, wanted: Collection[tuple[Sequence, int]]) -> bool:
        """Gives each sequence what its first so many tokens need, or none of them anything: False."""
        longer = [
            (s, writable, quantized)
            for s, tokens in wanted
            for writable, quantized in [self._lacks(s, tokens)]
            if writable or quantized
        ]
        allocator = self._allocator
        if not longer:
            return True
        writable, quantized = (sum(writable for _, writable, _ in longer), sum(quantized for _, _, quantized in longer))
        if writable > allocator.available_writable or quantized > allocator.available_full_blocks:
            return False
        for sequence, writable, quantized in longer:
            sequence.table.extend(allocator.allocate(writable))
            if quantized:
                sequence.quantized.extend(allocator.allocate_full_blocks(quantized))
        return True

    def _extend_in_part(self, sequence: Sequence, tokens: int) -> None:
        """What can be had of what its first `tokens` tokens need."""
        writable, quantized = self._lacks(sequence, tokens)
        allocator = self._allocator
        sequence.table.extend(allocator.allocate(min(writable, allocator.available_writable)))
        sequence.quantized.extend(allocator.allocate_full_blocks(min(quantized, allocator.available_full_blocks)))

    def _lacks(self, sequence: Sequence, tokens: int) -> tuple[int, int]:
        """(blocks to write to, blocks for what is filled) that its first `tokens` tokens need and it does not have."""
        written = -(-tokens // self._size) - len(sequence.table)
        full = tokens // self._size - sequence.num_sealed - len(sequence.quantized) if self._compresses else 0
        return max(0, written), max(0, full)

    def _shorten(self, sequence: Sequence, blocks: int, quantized: int) -> None:
        """Leaves the sequence so many blocks, and so many for those that are not full yet."""
        if len(sequence.table) > blocks:
            self._allocator.release(sequence.table[blocks:])
            del sequence.table[blocks:]
        if len(sequence.quantized) > quantized:
            self._allocator.release(sequence.quantized[quantized:])
            del sequence.quantized[quantized:]

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Registers the blocks that a step of the sequences has filled, for whoever begins with the same tokens."""
        size = self._size
        for sequence in sequences:
            full = sequence.num_computed // size
            if full > sequence.num_sealed:
                table, chain = sequence.table, sequence.chain
                chain.grow()
                for position in range(sequence.num_sealed, full):
                    quantized = sequence.quantized.pop(0) if self._compresses else None
                    table[position] = self._allocator.seal(table[position], chain.key(position), quantized)
                sequence.num_sealed = full

    def _restored(self, sequence: Sequence, position: int) -> tuple["array[int]", int, BlockKey]:
        """(table, where in it, what it holds) of a position of `Sequence.restoring`."""
        if position >= 0:
            return sequence.table, position, sequence.chain.key(position)
        parent = sequence.chain.digest(sequence.num_sealed - 1)
        return sequence.snapshot, ~position, state_key(parent, ~position)

    def free(self, sequence: Sequence, wanted: bool = False) -> None:
        """Takes all blocks from a sequence; `wanted`: it will come back for them."""
        for slot in sequence.restoring.values():
            self._allocator.give_up(slot)
        sequence.restoring = {}
        self._shorten(sequence, len(sequence.table), 0)
        table, allocator = sequence.table.tolist(), self._allocator
        if sequence.snapshots:
            older, table = self.states.with_snapshots(sequence)
            allocator.release(older, now=self._now, wanted=wanted)
        request = sequence.request
        allocator.release([*table, *sequence.snapshot], request.session, self._now, wanted, keep=request.cache_ttl)
        del sequence.table[:], sequence.snapshot[:]
        sequence.num_computed = sequence.num_sealed = sequence.followed = 0
        self.states.free(sequence)

    # --- steps -----------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """A step is being planned, at `now` seconds of any steady clock."""
        self._now = now
        self._allocator.expire(now)

    def restore(self, sequence: Sequence) -> bool:
        """Has the step under way restore as much of the sequence as may be, and then load its state; whether that is
        all of it."""
        while sequence.restoring:
            position, slot = next(iter(sequence.restoring.items()))
            if self._cost >= self._spec.copies_per_step:
                return False
            self._cost += DISK_COST if self._tiers.on_disk(slot) else 1
            del sequence.restoring[position]
            table, at, _ = self._restored(sequence, position)
            self._allocator.restore(slot, table[at])
            self._restores.append((sequence, position, slot))
            sequence.in_flight = True
        if sequence.snapshot:
            self.states.load(sequence)
        return True

    def receivable(self, running: Collection[Sequence]) -> int:
        """Blocks that may be taken over from another ring, with room left for `running` to grow."""
        slack = max(len(running) + 1, self._spec.full_blocks // 32)
        return max(0, self.free_blocks(running) - slack)

    @property
    def restoring(self) -> bool:
        """Whether the step under way has copies that a sequence is waiting for."""
        return bool(self._restores) or self.states.loading

    @property
    def ready(self) -> bool:
        """Whether a plan should be sent, be there something to compute or not."""
        return self.restoring or self.states.due or self.exchange.ready

    def take_copies(self) -> Copies:
        return self._allocator.take_copies()

    def close(self, failed: Collection[int] = (), *, computed: bool = True) -> list[Sequence]:
        """The step is over: what it has restored can be found by others, except for the slots `failed`. `computed`:
        what it has computed counts.

        Returns the sequences that must give up their blocks, since some were not restored.
        """
        restores, self._restores, self._cost = self._restores, [], 0
        self.exchange.arrivals.close()
        broken: dict[Sequence, None] = {}
        for sequence, position, slot in restores:
            sequence.in_flight = False
            table, at, key = self._restored(sequence, position)
            if slot not in failed:
                table[at] = self._allocator.seal(table[at], key)
                continue
            self._allocator.lost(slot, key)
            broken[sequence] = None
        self.states.close(self._now, copied=not failed, computed=computed)
        for sequence in broken:
            self.cached_tokens -= sequence.cached_tokens
            sequence.cached_tokens = 0
        return list(broken)

    # --- what others see -------------------------------------------------------------------------

    def census(self) -> AllocatorDump:
        used, total = self.states.used, self.states.total
        return structs.replace(
            self._allocator.census(),
            state_slots=total,
            state_slots_used=used,
            snapshot_blocks=self._spec.state_blocks,
            layers=self._spec.layers,
        )

    def reserve(self, running: int) -> int:
        """Blocks that an admission leaves free beside so many running sequences."""
        return max(running, self._spec.full_blocks // 100)

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError where an invariant does not hold. For tests, and for idle moments."""
        locked: dict[int, int] = {}
        for sequence in running:
            for slot in sequence.restoring.values():
                locked[slot] = locked.get(slot, 0) + 1
        tables = (table for s in running for table in (s.table, s.quantized, s.snapshot))
        self._allocator.check((*tables, *self.exchange.held, *self.states.held), locked)
        self.states.check(running)

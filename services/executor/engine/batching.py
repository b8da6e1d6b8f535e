"""Continuous batching: which tokens of which sequences a ring computes in its next step.

The batch is `{sequence: number of tokens}`; prefill and decode are not told apart. A step is two
calls, `schedule()` and `update()`; requests may be added and cancelled between them.

      add ──▶ waiting ──admit──▶ running ──▶ ended          urgency: lane (recovery, interactive,
                 ▲                  │                       batch), then arrival
                 └────preempt───────┘
    one step:  1. decodes, most urgent first; when blocks run out, the least urgent running sequence
                  gives up its blocks and is computed again later
               2. what is left of the token budget: prompts in chunks, most urgent first, running or
                  admitted now
               3. what is left then: drafts of the decodes' next tokens (`drafting.py`)

No hang: each step advances some sequence, or restores spilled blocks of one. The most urgent running
sequence may take every other's blocks, and one that does not fit the whole cache ends with an error.
With none running, the first that waits is admitted, since it fits the whole cache.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter

from services.executor.engine import admission
from services.executor.engine.admission import BatchSettings
from services.executor.engine.block_tables import BlockTables
from services.executor.engine.drafting import Drafter
from services.executor.engine.plan import StepPlan
from services.executor.engine.plan_builder import NO_STEP, Chunk, Row, Step, build_plan, rows_of
from services.executor.engine.protocol import EngineSpec, SampledToken
from services.executor.engine.recent import RecentlyEnded
from services.executor.engine.sequence import Ending, Sequence, SequenceState
from services.executor.kv_cache.prefix_index import root_digest
from shared.errors import InternalError, RyzansteinError
from shared.messages import GenerationRequest, GroupLoad, Refusal, TokenEntry

Entries = dict[str, list[TokenEntry]]
"""New tokens and endings by consumer."""

_URGENCY = attrgetter("urgency")


class ContinuousBatcher:
    """Decides every step of one ring, and owns its sequences and KV blocks. No clock, no I/O.

    Life of a step: `schedule()` → the engine executes the plan, in any thread → `update()` or
    `fail_step()`. One step is under way at most. A sequence that is cancelled meanwhile keeps its
    blocks until the step is over, since the ranks still write to them.
    """

    def __init__(
        self, spec: EngineSpec, settings: BatchSettings, namespace: str = "", drafter: Drafter | None = None
    ) -> None:
        """`namespace` (the model's name) sets this ring's prefix hashes apart from other models'."""
        settings.validate()
        self._spec = spec
        self._settings = settings
        self._root = root_digest(namespace)
        self._tables = BlockTables(spec, settings)
        self.drafter = drafter or Drafter(spec, settings)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        # Both lists are sorted by urgency.
        self._live: dict[str, Sequence] = {}
        self._ended = RecentlyEnded()
        self._owed: Entries = {}
        self._under_way = NO_STEP
        self._arrivals = 0
        self.step = 0
        """The last step that was scheduled; the first is 1."""
        self.preemptions = 0
        """Sequences that have had to give up their blocks."""

    # --- requests --------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> Refusal | None:
        """Takes a request on; a `Refusal` says why not. Safe while a step is under way.

        A repeat of an attempt, or an attempt older than the known one, is accepted and ignored. A
        newer attempt takes the place of the older, which falls silent.
        """
        if request.attempt <= self._known_attempt(request.generation_id):
            return None
        self._replace(request.generation_id)
        error = admission.malformed(request, self._spec)
        if error is not None:
            return admission.refusal(request, error)
        entry = admission.finished_before(request, self._spec)
        if entry is not None:
            self._owe(request.consumer, entry)
            self._ended.add(request)
            return None
        error = admission.too_long(request, self._spec)
        if error is None and len(self._waiting) >= self._settings.max_waiting:
            error = admission.queue_full(len(self._waiting))
        if error is not None:
            return admission.refusal(request, error)
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, self._spec.block_size, self._root)
        self._live[request.generation_id] = sequence
        insort(self._waiting, sequence, key=_URGENCY)
        return None

    def cancel(self, generation_ids: Iterable[str], attempt: int = -1) -> None:
        """Ends generations with `finish="cancelled"`; unknown ids are ignored.

        With `attempt`, only that attempt and earlier ones are withdrawn: the client still waits, so they
        end with a retryable error, and not as if it had gone. Safe while a step is under way: its
        result for them is dropped.
        """
        for generation_id in generation_ids:
            sequence = self._live.get(generation_id)
            if sequence is None or -1 < attempt < sequence.request.attempt:
                continue
            sequence.ending = Ending.CANCELLED if attempt < 0 else Ending.WITHDRAWN
            if not sequence.in_flight:
                self._end(sequence, sequence.ending_entry())

    # --- steps -----------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> tuple[StepPlan, list[Row]] | None:
        """The next step, and what is sampled, aligned with the plan's `sample_rows`.

        `now`: seconds of any steady clock. None when there is nothing to compute; entries may be owed
        then (`take_entries`).
        """
        if self._under_way is not NO_STEP:
            raise InternalError("A step was scheduled while another is under way.")
        self._tables.begin(now)
        self._make_way()
        preemptions = self.preemptions
        batch = self._decodes()
        # A sequence that has just given up its blocks must not take them back in the same step.
        self._add_prefills(batch, admitting=self.preemptions == preemptions)
        if not batch and not self._tables.restoring:
            return None
        for chunk in batch:
            chunk.sequence.in_flight = True
        self.drafter.extend(batch, self._tables, self._running)
        self.step += 1
        plan, sampled = build_plan(self.step, batch, self._tables.take_copies(), self._spec.block_size)
        self._under_way = Step(batch, sampled, rows_of(sampled))
        return plan, list(self._under_way.rows)

    def update(self, sampled: Seq[SampledToken], seconds: float = 0.0) -> Entries:
        """Ends the step under way with the engine's answer, after `seconds` (0: unknown). Returns all entries
        owed."""
        if len(sampled) != len(self._under_way.rows):
            raise InternalError(f"The step gave {len(sampled)} tokens for {len(self._under_way.rows)} rows.")
        drawn = self.drafter.take(self._under_way, sampled, seconds)
        for chunk in self._close_step().batch:
            self._tables.seal(chunk.sequence)
        for sequence, new in drawn:
            self._receive(sequence, new)
        self._settle()
        return self.take_entries()

    def fail_step(self, error: RyzansteinError, rows: Collection[int] | None = None) -> Entries:
        """Ends the step under way without a result, and its sequences with `error`.

        With `rows` (indices into `sample_rows`) only those sequences end; the others are computed again, and
        without drafts where only a row after a draft has failed.
        The ranks have executed the plan's copies: of what may not have been, only `fail_all` is right.
        """
        for row in self._close_step().failed(rows):
            if row.ahead:  # without the draft nobody would have seen it
                row.sequence.speculates = False
            elif row.sequence.ending is Ending.NONE:
                self._end(row.sequence, row.sequence.error_entry([], error))
        self._settle()
        return self.take_entries()

    def fail_restores(self, slots: Collection[int]) -> Entries:
        """Ends the step under way, which was not computed: these spill slots cannot be read.

        All its sequences are computed again; those that the slots belong to, from what is left of them.
        """
        self._close_step(slots)
        self._settle()
        return self.take_entries()

    def fail_all(self, error: RyzansteinError) -> Entries:
        """Ends everything with `error`, the step under way included: the ring is lost, or leaves."""
        self._close_step()
        self._settle()
        for sequence in list(self._live.values()):
            self._end(sequence, sequence.error_entry([], error))
        return self.take_entries()

    def take_entries(self) -> Entries:
        """Entries that are owed without a step (ends of waiting sequences); each is given out once."""
        entries, self._owed = self._owed, {}
        return entries

    # --- what others see -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `schedule` or `take_entries` has something to give."""
        return bool(self._waiting or self._running or self._owed)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache."""
        return self._tables.cached_tokens

    def load(self) -> GroupLoad:
        """How full the ring is."""
        unfinished = sum(s.remaining for s in self._running if s.remaining > 1)
        return GroupLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=unfinished + sum(s.remaining for s in self._waiting),
            free_blocks=self._tables.free_blocks(self._running),
            total_blocks=self._spec.total_blocks,
        )

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold. For tests, and for idle moments."""
        self._tables.check(self._running)
        for sequences in (self._waiting, self._running):
            assert sequences == sorted(sequences, key=_URGENCY), "a queue is out of order"
        assert len(self._running) <= self._settings.max_sequences, "too many sequences run"
        queued = {id(s) for s in (*self._waiting, *self._running) if s.ending is not Ending.REPLACED}
        assert queued == {id(s) for s in self._live.values()}, "a sequence is in no queue, or an ended one is"

    # --- scheduling ------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Sequences of the batch lane give up their places to a more urgent one that waits."""
        if not self._waiting or self._waiting[0].is_batch:
            return
        head = self._waiting[0]
        lent = [s for s in self._running if s.is_batch]
        if not self._tables.could_place(head, self._running, lent):
            return
        while self._running and self._running[-1].is_batch and self._place(head) is None:
            self._preempt(self._running[-1])

    def _decodes(self) -> list[Chunk]:
        """One token for every running sequence that has only one to compute."""
        batch = []
        for sequence in list(self._running):
            if (
                sequence.state is SequenceState.RUNNING
                and sequence.remaining == 1
                and (not sequence.restoring or self._tables.restore(sequence))
                and self._grow(sequence)
            ):
                batch.append(Chunk(sequence, 1))
        return batch

    def _grow(self, sequence: Sequence) -> bool:
        """Sees that the table covers all tokens; False when the sequence itself had to give up its blocks.

        Victims come from the end of the order of urgency, so they are not in the batch yet.
        """
        while not self._tables.cover(sequence, len(sequence.tokens), self._running):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _add_prefills(self, batch: list[Chunk], admitting: bool) -> None:
        """Fills the token budget with prompts, most urgent first. An admitted one may need one token only."""
        budget = self._settings.max_batch_tokens - len(batch)
        prefills = [s for s in reversed(self._running) if s.remaining > 1]
        before: list[Sequence] = []
        while budget > 0:
            head = self._waiting[0] if admitting and self._waiting else None
            if head is not None and (not prefills or head.urgency < prefills[-1].urgency):
                admitting = self._admit(head)
                if not admitting:
                    continue
                sequence = head
            elif prefills:
                sequence = prefills.pop()
            else:
                return
            preemptions = self.preemptions
            length = self._prefill(sequence, budget, before, batch)
            if length:
                batch.append(Chunk(sequence, length))
                budget -= length
            before.append(sequence)
            if self.preemptions > preemptions:
                admitting = False
                prefills = [s for s in prefills if s.state is SequenceState.RUNNING]

    def _prefill(self, sequence: Sequence, budget: int, before: list[Sequence], batch: list[Chunk]) -> int:
        """How many tokens of a prompt the step computes, `budget` at most; 0 when it has to wait.

        What one of those `before` it is about to compute as well, it waits for, to share it then.
        """
        if sequence.restoring and not self._tables.restore(sequence):
            return 0
        self._tables.share_more(sequence)
        if self._tables.is_being_computed(sequence, before):
            return 0
        end = sequence.num_computed + min(sequence.remaining, budget)
        while not self._tables.cover(sequence, end, self._running):
            covered = len(sequence.table) * self._spec.block_size
            if covered > sequence.num_computed:
                return covered - sequence.num_computed
            victim = self._running[-1]
            if victim is sequence or any(chunk.sequence is victim for chunk in batch):
                return 0  # those in the batch advance, and will end or give up their blocks
            self._preempt(victim)
        return end - sequence.num_computed

    def _place(self, sequence: Sequence) -> list[int] | None:
        """What is in the cache of a waiting sequence's beginning; None when there is no room for it now."""
        if len(self._running) >= self._settings.max_sequences:
            return None
        return self._tables.place(sequence, self._running)

    def _admit(self, sequence: Sequence) -> bool:
        """Moves the first waiting sequence into the batch, where there is room for all tokens it has."""
        found = self._place(sequence)
        if found is None:
            return False
        self._tables.admit(sequence, found)
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_URGENCY)
        sequence.state = SequenceState.RUNNING
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Its tokens stay; what is still cached or spilled when its turn comes again is not computed again."""
        self._running.remove(sequence)
        sequence.preempted = True
        self._tables.free(sequence, wanted=True)
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_URGENCY)
        self.preemptions += 1

    # --- results ---------------------------------------------------------------------------------

    def _close_step(self, failed_slots: Collection[int] = ()) -> Step:
        step, self._under_way = self._under_way, NO_STEP
        for chunk in step.batch:
            chunk.sequence.in_flight = False
            self._tables.trim(chunk.sequence)
        for sequence in self._tables.close(failed_slots):
            self._preempt(sequence)
        return step

    def _receive(self, sequence: Sequence, new: list[SampledToken]) -> None:
        """Tells the consumer of `new` tokens, which the sequence has already."""
        finish = sequence.finish_reason(self._spec.context_length)
        if finish:
            self._end(sequence, sequence.news(new, finish))
        elif (too_long := admission.kv_exhausted(len(sequence.tokens), self._spec)) is not None:
            self._end(sequence, sequence.error_entry(new, too_long))
        else:
            self._owe(sequence.request.consumer, sequence.news(new))

    def _settle(self) -> None:
        """Ends the sequences that were cancelled or replaced while the step was under way."""
        for sequences in (self._running, self._waiting):
            for sequence in [s for s in sequences if s.ending is not Ending.NONE]:
                self._end(sequence, sequence.ending_entry())

    # --- ends ------------------------------------------------------------------------------------

    def _known_attempt(self, generation_id: str) -> int:
        """The newest attempt that was taken on; -1 for an unknown generation."""
        sequence = self._live.get(generation_id)
        return sequence.request.attempt if sequence else self._ended.attempt(generation_id)

    def _replace(self, generation_id: str) -> None:
        sequence = self._live.pop(generation_id, None)
        if sequence is None:
            return
        self._ended.add(sequence.request)
        sequence.ending = Ending.REPLACED
        if not sequence.in_flight:
            self._end(sequence, None)

    def _end(self, sequence: Sequence, entry: TokenEntry | None) -> None:
        """Takes the sequence out of everything; without `entry` nobody is told."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._tables.free(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.ENDED
        if entry is not None:
            del self._live[sequence.request.generation_id]
            self._ended.add(sequence.request)
            self._owe(sequence.request.consumer, entry)

    def _owe(self, consumer: str, entry: TokenEntry) -> None:
        self._owed.setdefault(consumer, []).append(entry)

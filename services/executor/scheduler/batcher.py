"""Continuous batching: which tokens of which sequences a ring computes in its next step.

The batch is `{sequence: number of tokens}`; prefill and decode are not told apart. A step is two
calls, `schedule()` and `update()`; requests may be added and cancelled between them.

      add ──▶ waiting ──admit──▶ running ──▶ ended          urgency: lane (recovery, interactive,
                 ▲                  │                       prefill ahead, batch), then arrival
                 └────preempt───────┘
    A request with a grammar is held before it waits, until the grammar has been compiled (`release`); one with a LoRA
    adapter until its files are on this host's disk (`adapter_ready`).

    one step:  1. recovery and interactive requests: decodes, then prompts in chunks, running or admitted
                  now; where there is no room, the least urgent running sequence gives up its blocks, and
                  one of the batch lane its place too, and is computed again later (`planning/step_planner.py`)
               2. what is left of the token budget: the same for the batch lane
               3. what is left then: drafts of the decodes' next tokens (`drafts/drafting.py`)

No hang: each step advances some sequence, or restores spilled blocks of one. The most urgent running
sequence may take every other's blocks, and one that does not fit the whole cache ends with an error.
With none running, the first that waits is admitted, since it fits the whole cache.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from services.executor.core.engine import DraftPlan, DraftToken, EngineSpec, SampledToken, SpilledBlock
from services.executor.core.prompt_results import Floats, PromptTokenScores
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.kv_cache.prefix_index import root_digest, salted_root
from services.executor.kv_transfer.exchange import Exchange
from services.executor.scheduler import admission
from services.executor.scheduler.adapter_slots import AdapterSlots
from services.executor.scheduler.admission import Admission, BatchSettings
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.features.base import FeatureContext, PlannedStep
from services.executor.scheduler.features.catalog import FEATURES
from services.executor.scheduler.planning.overlap import (
    OverlapScheduling,
    StepsUnderWay,
    drop_wasted_rows,
    plan_ahead,
    step_ahead,
)
from services.executor.scheduler.planning.step_planner import StepPlanner
from services.executor.scheduler.sequence import Ending, Sequence, SequenceState, StageTimes, vector_of
from services.executor.scheduler.stats import Stages, load_of, view_of
from services.executor.scheduler.steps import NO_STEP, SampledRow, ScheduledTokens, Step, build_plan, in_order, rows_of
from services.executor.structured_output import GrammarState
from shared.errors import DeadlineExceeded, InternalError, RyzansteinError
from shared.messages import GenerationRequest, GroupLoad, Refusal, TokenEntry
from shared.messages.debugging import AllocatorDump

Entries = dict[str, list[TokenEntry]]  # new tokens and endings by consumer


class Scheduler:
    """Decides every step of one ring, and owns its sequences and KV blocks. No clock, no I/O.

    Life of a step: `schedule()` → the engine executes the plan, in any thread → `update()` or
    `fail_step()`. While it is under way `schedule_ahead()` may give the next one (`planning/overlap.py`); both are
    executed in order, and the calls that end a step end the older one. A sequence that is cancelled
    meanwhile keeps its blocks until its steps are over, since the ranks still write to them.
    """

    def __init__(
        self,
        spec: EngineSpec,
        settings: BatchSettings,
        namespace: str = "",
        drafter: Drafter | None = None,
        board: RingBoard | None = None,
    ) -> None:
        """`namespace` (the model's name) sets this ring's prefix hashes apart from other models'. `drafter`: None:
        nothing is drafted. `board`: is told how long the stages of requests take."""
        settings.validate()
        self._spec = spec
        # Tokens that a sequence may have at most to go on.
        self._longest = min(spec.context_length - 1, spec.capacity)
        self._settings = settings
        self._root = root_digest(namespace)
        self._tables = BlockTables(spec, settings, self._root)
        self.drafter = drafter or Drafter(spec, settings, ())
        self._planner = StepPlanner(spec, settings, self._tables)
        self._lookahead = OverlapScheduling(self._tables, self._planner, self.drafter)
        self._steps = StepsUnderWay(self._tables, self._planner)
        self._live: dict[str, Sequence] = {}
        self.interactive = 0  # of these, the ones that somebody waits for: all but those of the batch lane
        # Of these, the ones whose grammar is being compiled, or whose adapter's files are being fetched.
        self._held: dict[str, Sequence] = {}
        self._directories: dict[str, str] = {}  # where the files of adapters are, by digest
        self._slots = AdapterSlots(spec.max_adapters)
        context = FeatureContext(spec, self._tables, self._planner.running, self._slots, self._directories)
        made = [feature.make(context) for feature in FEATURES]
        features = [feature for feature in made if feature is not None]
        self._planner.features = features
        self._fields = [feature.fields for feature in features if feature.fields is not None]
        self._admission = Admission(spec, [feature.checks for feature in FEATURES])
        self._ended = admission.RecentlyEnded()
        self._owed: Entries = {}
        self._leaving = False  # whether some sequence is to end once no step computes it
        self._arrivals = 0
        self._now = 0.0
        self._stages = Stages(board)
        self.step = 0  # the last step that was scheduled; the first is 1

    def recover(self, blocks: Seq[SpilledBlock]) -> int:
        """As `BlockTables.recover`, before the first request."""
        return self._tables.recover(blocks)

    # --- requests --------------------------------------------------------------------------------

    def add(self, request: GenerationRequest, now: float = 0.0) -> Refusal | None:
        """Takes a request on, at `now` seconds of the clock of `schedule`; a `Refusal` says why not. Safe while a
        step is under way.

        A repeat of an attempt, or an attempt older than the known one, is accepted and ignored. A
        newer attempt takes the place of the older, which falls silent.
        """
        if self.knows(request):
            return None
        self._replace(request.generation_id)
        error = self._admission.malformed(request)
        if error is not None:
            return admission.refusal(request, error)
        entry = admission.finished_before(request, self._spec)
        if entry is not None:
            self._owe(request.consumer, entry)
            self._ended.add(request)
            return None
        error = admission.too_long(request, self._spec) or self._queue_full(request)
        if error is not None:
            return admission.refusal(request, error)
        self._arrivals += 1
        root = salted_root(self._root, request.cache_salt, request.adapter)
        vector = vector_of(request, self._spec)
        sequence = Sequence(request, self._arrivals, self._spec.block_size, root, vector)
        sequence.most_tokens = min(sequence.most_tokens, self._longest + 1)
        sequence.times = StageTimes(now)
        if request.adapter and request.adapter not in self._directories:
            sequence.awaits.add("adapter")
            sequence.state = SequenceState.HELD
        self._live[request.generation_id] = sequence
        self.interactive += not sequence.is_batch
        if sequence.state is SequenceState.HELD:
            self._held[request.generation_id] = sequence
        else:
            self._planner.wait(sequence)
        return None

    def knows(self, request: GenerationRequest) -> bool:
        """Whether `add` would ignore it: this attempt, or a later one, was taken on before."""
        sequence = self._live.get(request.generation_id)
        known = sequence.request.attempt if sequence else self._ended.attempt(request.generation_id)
        return request.attempt <= known

    def release(self, request: GenerationRequest, grammar: GrammarState | RyzansteinError) -> None:
        """The grammar of `request`, as it was added, has been compiled, or cannot be. Ignored where nobody waits
        for it any more. Safe while a step is under way."""
        sequence = self._held.get(request.generation_id)
        if sequence is None or sequence.request is not request:
            return
        if isinstance(grammar, RyzansteinError):
            self._end(sequence, sequence.error_entry([], grammar))
            return
        sequence.sampling.grammar = grammar
        if grammar.complete:  # an earlier attempt was lost before it said so
            self._end(sequence, sequence.entry([], "stop"))
            return
        self._has("grammar", sequence)

    def adapter_ready(self, digest: str, directory: str) -> None:
        """The files of an adapter are in `directory`, which stays as it is until `adapter_gone`."""
        self._directories[digest] = directory
        for sequence in self._awaiting_adapter(digest):
            self._has("adapter", sequence)

    def adapter_failed(self, digest: str, error: RyzansteinError) -> None:
        """An adapter cannot be had: those that wait for it end with `error`."""
        for sequence in self._awaiting_adapter(digest):
            self._end(sequence, sequence.error_entry([], error))

    def adapter_gone(self, digest: str) -> None:
        """Its files are about to be deleted. Not of one that is in use (`adapters_in_use`)."""
        self._directories.pop(digest, None)

    @property
    def adapters_in_use(self) -> set[str]:
        """Digests of adapters whose files some request needs, or a step that is still to be planned."""
        return {s.request.adapter for s in self._live.values()} | set(self._slots.pending)

    @property
    def adapters(self) -> list[str]:
        """Digests of the adapters that the ranks hold in memory."""
        return self._slots.digests

    def _awaiting_adapter(self, digest: str) -> list[Sequence]:
        return [s for s in self._held.values() if "adapter" in s.awaits and s.request.adapter == digest]

    def _has(self, what: str, sequence: Sequence) -> None:
        """A held sequence has this now; it waits for a place once it has all that it needs."""
        sequence.awaits.discard(what)
        if not sequence.awaits:
            del self._held[sequence.request.generation_id]
            sequence.state = SequenceState.WAITING
            self._planner.wait(sequence)

    def claim(self, generation_ids: Iterable[str], claim: int) -> None:
        """Another gateway owns generations: what is said of them under an older claim is ignored from now on."""
        for generation_id in generation_ids:
            if (sequence := self._live.get(generation_id)) is not None:
                sequence.claim = max(sequence.claim, claim)

    def cancel(self, generation_ids: Iterable[str], attempt: int = -1, claim: int = -1) -> None:
        """Ends generations with `finish="cancelled"`; unknown ids are ignored, and those that a gateway with a
        newer claim than `claim` owns (-1: none is).

        With `attempt`, only that attempt and earlier ones are withdrawn: the client still waits, so they
        end with a retryable error, and not as if it had gone. Safe while a step is under way: its
        result for them is dropped.
        """
        for generation_id in generation_ids:
            sequence = self._live.get(generation_id)
            if sequence is None or -1 < attempt < sequence.request.attempt or -1 < claim < sequence.claim:
                continue
            sequence.ending = Ending.CANCELLED if attempt < 0 else Ending.WITHDRAWN
            if sequence.in_flight:
                self._leaving = True
            else:
                self._end(sequence, sequence.ending_entry())

    def expire(self, now: float) -> bool:
        """Ends what waits for its first token and whose deadline is not after `now` (unix seconds): nobody
        waits for it any more. It is what bounds the starvation of the batch lane. Safe while a step is
        under way. Returns whether there was any."""
        waiting = (*self._planner.waiting, *self._held.values())
        late = [s for s in waiting if s.is_late(now) and not s.in_flight]
        for sequence in late:
            error = DeadlineExceeded("No room for the request before its deadline; try again later.")
            entry = sequence.error_entry([], error)
            self._end(sequence, msgspec.structs.replace(entry, retryable=False))  # it is late everywhere
        return bool(late)

    # --- steps -----------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> tuple[StepPlan, list[SampledRow]] | None:
        """The next step, and what is sampled, aligned with the plan's `sample_rows`.

        `now`: seconds of any steady clock. None when there is nothing to compute; entries may be owed
        then (`take_entries`).
        """
        engine = self.drafter.engine
        if self._steps.oldest is not NO_STEP or (engine is not None and engine.members):
            raise InternalError("A step was scheduled while another, or a round of drafts, is under way.")
        self._now = now
        self._tables.begin(now)
        batch = self._planner.plan()
        if self._planner.admitted:
            self._stages.admitted(self._planner.take_admitted(), now)
        if not batch and not self._tables.ready:
            return None
        self.drafter.extend(batch, self._tables, self._planner.running)
        followed = engine is not None and engine.follows(batch)
        self.step += 1
        planned = PlannedStep(batch)
        fields = self._fields_of(planned)
        plan, sampled = build_plan(self.step, batch, self._tables.take_copies(), self._spec.block_size)
        if fields or followed:
            plan = msgspec.structs.replace(plan, **fields, followed=followed)
        rows = rows_of(sampled, self._planner.rows)
        self._steps.begin(Step(batch, sampled, rows, planned.handlers, followed=followed))
        return plan, list(rows)

    def plan_drafts(self, now: float = 0.0) -> tuple[DraftPlan, list[SampledRow]] | None:
        """What the engine is to draft for the next step, and the rows that it samples first; None: nothing. With
        no step under way; `take_drafts` or `drop_drafts` must follow before `schedule`."""
        planner, engine = self._planner, self.drafter.engine
        if engine is None or not engine.used:
            return None
        if planner.isolates or (planner.waiting and planner.could_admit()):
            return None  # who is computed alone is; who can be admitted comes first
        self._tables.begin(now)
        count = engine.begin_round(planner.running, self._tables, self.drafter.is_sure)
        if not count:
            return None
        for sequence in engine.members:
            sequence.in_flight = True
        first, self.step = self.step + 1, self.step + count
        return engine.draft_plan(first, self._tables.take_copies())

    def take_drafts(self, found: Seq[Seq[DraftToken]], seconds: float = 0.0) -> None:
        """Ends the round under way with the engine's answer: proposals for each of the rows, after so many seconds."""
        engine = self.drafter.engine
        asked = 0 if engine is None else len(engine.members)
        if engine is None or len(found) != asked:
            raise InternalError(f"The draft model answered for {len(found)} of {asked} sequences.")
        self._end_round(engine.take_round(found, seconds))

    def drop_drafts(self) -> None:
        """Ends the round under way, which has failed: the engine drafts no more for its sequences."""
        if self.drafter.engine is not None:
            self._end_round(self.drafter.engine.drop_round())

    def _end_round(self, members: Seq[Sequence]) -> None:
        for sequence in members:
            sequence.in_flight = False
        self._settle()

    def schedule_ahead(self, now: float = 0.0) -> tuple[StepPlan, list[SampledRow]] | None:
        """The step behind the one under way, as `schedule` would plan it when that is over. Its token ids of -1 - k
        stand for what row k of that one samples. None where it cannot be planned yet."""
        successors = self._lookahead.after(self._steps.oldest) if self._steps.alone else None
        if not successors:
            return None
        self._tables.begin(now)
        self.step += 1
        step = step_ahead(successors)
        rows = [(one.sequence, one.position, 1, 0) for one in successors]
        fields = self._fields_of(PlannedStep(step.batch, rows))
        plan = plan_ahead(self.step, successors, self._tables.take_copies(), self._spec.block_size)
        if fields:
            plan = msgspec.structs.replace(plan, **fields)
        self._steps.begin(step)
        return plan, list(step.rows)

    def _fields_of(self, step: PlannedStep) -> dict[str, Any]:
        """Before copies are taken: what a feature says may have blocks evicted."""
        fields: dict[str, Any] = {}
        for of_feature in self._fields:
            if found := of_feature(step):
                fields.update(found)
        return fields

    def update(
        self,
        sampled: Seq[SampledToken],
        seconds: float = 0.0,
        pooled: Floats | None = None,
        scores: PromptTokenScores | None = None,
    ) -> Entries:
        """Ends the oldest step under way with the engine's answer, `seconds` after it began or the step before it
        ended (0: unknown). `pooled`: what the engine has summed up of `plan.pools`; `scores`: what it gives of
        `plan.score_rows`. Returns all entries owed."""
        step = self._steps.oldest
        if len(sampled) != len(step.rows):
            raise InternalError(f"The step gave {len(sampled)} tokens for {len(step.rows)} rows.")
        self._now += seconds
        if step.ahead:
            step, sampled = drop_wasted_rows(step, sampled)
        if self._planner.timed:
            self._planner.took(step.batch, seconds)
        drawn = self.drafter.take(step, sampled, seconds)
        self._steps.close()
        self._tables.seal([chunk.sequence for chunk in step.batch])
        for handle in step.handlers:
            for sequence, entry in handle(pooled, scores):
                self._stages.drawn(sequence, self._now, finished=True)
                self._end(sequence, entry)
        self._tell(drawn)
        if len(step.sampled) < len(step.batch):  # some prompt goes on
            for sequence in self._stages.progressed([c.sequence for c in step.batch], self._now):
                self._owe(sequence.request.consumer, sequence.progress_entry())
        self._settle()
        return self.take_entries()

    def fail_step(self, error: RyzansteinError, rows: Collection[int] | None = None) -> Entries:
        """Ends the oldest step under way without a result, and its sequences with `error`. A later one must have
        been executed too, and is of no use.

        With `rows` (indices into `sample_rows`) only those sequences end; the others are computed again, and
        without drafts where only a row after a draft has failed.
        The ranks have executed the plan's copies: of what may not have been, only `fail_all` is right.
        """
        self.drafter.forget_proposals()
        for row in self._steps.drop().failed(rows):
            if row.ahead:  # without the draft nobody would have seen it
                row.sequence.speculates = False
            elif row.sequence.ending is Ending.NONE and row.sequence.state is not SequenceState.ENDED:
                self._end(row.sequence, row.sequence.error_entry([], error))
        self._settle()
        return self.take_entries()

    def fail_restores(self, slots: Collection[int]) -> Entries:
        """Ends the step under way, which was not computed: these spill slots cannot be read.

        All its sequences are computed again; those that the slots belong to, from what is left of them.
        """
        self.drafter.forget_proposals()
        self._steps.drop(slots)
        self._settle()
        return self.take_entries()

    def fail_all(self, error: RyzansteinError) -> Entries:
        """Ends everything with `error`, the steps under way included: the ring is lost, or leaves."""
        self.drop_drafts()
        self.drafter.forget_proposals()
        self._steps.drop()
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
        """Whether `schedule` or `take_entries` has something to give. What is held has not, until it is released."""
        return bool(self._planner.waiting or self._planner.running or self._owed or self._tables.ready)

    @property
    def exchange(self) -> Exchange:
        return self._tables.exchange

    @property
    def places(self) -> int:
        """Sequences that may run at once."""
        return self._tables.states.places or self._settings.max_sequences

    @property
    def receivable(self) -> int:
        """Blocks that may be taken over from another ring."""
        return self._tables.receivable(self._planner.running)

    @property
    def under_way(self) -> Seq[ScheduledTokens]:
        """What the step that was scheduled last computes of each sequence."""
        return self._steps.newest.batch

    @property
    def preemptions(self) -> int:
        return self._planner.preemptions

    @property
    def shares_time(self) -> bool:
        """Whether the step that was scheduled last computes part of a long prompt beside decodes: how long it takes
        says nothing of how fast prompts are computed."""
        return self._planner.shared

    @property
    def adapter_reads(self) -> tuple[int, int]:
        """Adapters that were read into a slot; those whose slot another was read into."""
        return self._slots.loads, self._slots.evictions

    @property
    def cached_tokens(self) -> int:
        return self._tables.cached_tokens

    def load(self) -> GroupLoad:
        return load_of(self._planner, self._tables, self._held.values(), self._spec)

    def sequences_under_way(self) -> list[Sequence]:
        """The sequences of the step that was scheduled last, in the order of its plan."""
        return [chunk.sequence for chunk in in_order(self._steps.newest.batch)]

    def look(self) -> tuple[list[Sequence], AllocatorDump]:
        """All there is, as it stands. For whoever looks into a ring: nothing of it may be changed."""
        return view_of(self._planner, self._tables, self._held.values())

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold. For tests, and for idle moments."""
        self._tables.check([*self._planner.running, *self._steps.ended])
        self._planner.check()
        queued = {
            id(s) for s in (*self._planner.waiting, *self._planner.running) if s.ending is not Ending.REPLACED
        } | {id(s) for s in self._held.values()}
        assert queued == {id(s) for s in self._live.values()}, "a sequence is in no queue, or an ended one is"
        for sequence in self._planner.running:
            assert sequence.followed <= sequence.num_computed, "the draft model is ahead"
        assert self.interactive == sum(not s.is_batch for s in self._live.values()), "it is miscounted"

    # --- admission -------------------------------------------------------------------------------

    def _queue_full(self, request: GenerationRequest) -> RyzansteinError | None:
        """Whether as many wait before the request as may: preemptible requests never block others."""
        waiting = (*self._planner.waiting, *self._held.values()) if self._held else self._planner.waiting
        ahead = len(waiting)
        if ahead < self._settings.max_waiting:
            return None
        if request.lane != "batch" and not request.prefill:
            ahead = sum(1 for sequence in waiting if not sequence.is_batch)
        return admission.queue_full(ahead) if ahead >= self._settings.max_waiting else None

    # --- results ---------------------------------------------------------------------------------

    def _tell(self, drawn: Seq[tuple[Sequence, list[SampledToken]]]) -> None:
        """Tells the consumers of new tokens, which the sequences have already."""
        owed, ended = self._owed, SequenceState.ENDED
        for sequence, new in drawn:
            if sequence.state is ended:
                continue
            tokens = sequence.tokens
            if (  # nearly always: it goes on, with one more token and nothing else to tell; without a call for each
                len(new) == 1
                and new[0].logprobs is None
                and sequence.announced
                and len(tokens) < sequence.most_tokens
                and tokens[-1] not in sequence.stops
                and sequence.sampling.grammar is None
                and sequence.scores is None
            ):
                request = sequence.request
                position = len(tokens) - sequence.prompt_tokens - 1
                entry = TokenEntry(request.generation_id, request.attempt, position, [new[0].token])
                owed.setdefault(request.consumer, []).append(entry)
            else:
                self._receive(sequence, new)

    def _receive(self, sequence: Sequence, new: list[SampledToken]) -> None:
        """`_tell` of any: of one that has its first token, or may have its last."""
        finish = sequence.finish_reason(self._spec.context_length)
        if finish or not sequence.times.first_token:
            self._stages.drawn(sequence, self._now, finished=bool(finish))
        if finish:
            self._end(sequence, sequence.news(new, finish))
        elif (too_long := admission.kv_exhausted(len(sequence.tokens), self._spec)) is not None:
            self._end(sequence, sequence.error_entry(new, too_long))
        else:
            self._owe(sequence.request.consumer, sequence.news(new))

    def _settle(self) -> None:
        """Ends the sequences that were cancelled or replaced while steps computed them."""
        if not self._leaving:  # nearly always
            return
        leaving = [s for s in (*self._planner.running, *self._planner.waiting) if s.ending is not Ending.NONE]
        self._leaving = any(sequence.in_flight for sequence in leaving)
        for sequence in leaving:
            if not sequence.in_flight:
                self._end(sequence, sequence.ending_entry())

    # --- ends ------------------------------------------------------------------------------------

    def _replace(self, generation_id: str) -> None:
        sequence = self._live.pop(generation_id, None)
        if sequence is None:
            return
        self.interactive -= not sequence.is_batch
        self._ended.add(sequence.request)
        sequence.ending = Ending.REPLACED
        if sequence.in_flight:
            self._leaving = True
        else:
            self._end(sequence, None)

    def _end(self, sequence: Sequence, entry: TokenEntry | None) -> None:
        """Takes the sequence out of everything; without `entry` nobody is told. Its blocks are its own until no
        step writes to them."""
        if sequence.state is SequenceState.RUNNING:
            self._planner.leave(sequence)
            if not sequence.in_flight:
                self._tables.free(sequence)
        elif sequence.state is SequenceState.HELD:
            del self._held[sequence.request.generation_id]
        else:
            self._planner.waiting.remove(sequence)
        sequence.state = SequenceState.ENDED
        if entry is not None:
            del self._live[sequence.request.generation_id]
            self.interactive -= not sequence.is_batch
            self._ended.add(sequence.request)
            self._owe(sequence.request.consumer, entry)

    def _owe(self, consumer: str, entry: TokenEntry) -> None:
        self._owed.setdefault(consumer, []).append(entry)

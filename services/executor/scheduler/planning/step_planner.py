"""Which sequences a step computes, and how many tokens of each.

Recovery and interactive requests first; the batch lane gets what they leave, and gives up its places,
blocks and share of the tokens within one step. Prompts that are computed ahead of their requests go first in it:

    token budget   [ decodes, prompts: recovery, interactive | decodes, prompts: batch ]
    running        [ most urgent ........................... | batch .... least urgent ]
                     make way? never, only to each other's growth ▲        ▲ for whoever is in a hurry

Requests that may have killed another ring are each computed in steps of their own, every other step at most; what
runs beside them keeps its place meanwhile.

A prompt that needs more than one step gets a share of the time of each while somebody waits for decodes
(`prefill_pace.py`); several such prompts take turns, a step each. Shorter ones are computed at once.

Features may keep a sequence from its place, and limit what is computed of it (`features/base.py`).

Batch work may starve while others keep the ring full: that is what the lane is for. What bounds it is the
request's deadline (`Scheduler.expire`).
"""

from bisect import bisect_left, insort
from collections.abc import Collection
from operator import attrgetter

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables, PrefixMatch
from services.executor.scheduler.features.base import PlaceClaims, StepBudget, StepFeature
from services.executor.scheduler.planning.prefill_pace import PrefillPace
from services.executor.scheduler.sequence import Sequence, SequenceState
from services.executor.scheduler.steps import SampledRow, ScheduledTokens
from shared.messages import LANES

URGENCY = attrgetter("urgency")
# Of the steps while no long prompt runs, one is timed, so that what decodes cost is known when one comes.
TIMED_EVERY = 8
_BATCH = (LANES.index("batch"),)  # comes before the urgency of any batch request, and after that of any other


class _Step:
    def __init__(self, budget: int, features: Collection[StepFeature]) -> None:
        self._features = features
        self._claims: list[PlaceClaims] | None = None
        self._budgets: list[StepBudget] | None = None
        # How many of those that wait, from the first on, cannot have a place now, as a feature says.
        self.passed = 0
        # What keeps the one behind them from a place, until sequences of the batch lane have made way.
        self.refusing: list[PlaceClaims] = []
        self.chunks: list[ScheduledTokens] = []
        self.budget = budget  # tokens that it may still compute
        self.before: list[Sequence] = []  # those whose prompts were looked at, most urgent first
        self.only: Sequence | None = None  # who is computed alone; None: all who need not be
        self.paced = False  # whether long prompts share its time with decodes that somebody waits for
        self.turn: Sequence | None = None  # whose long prompt it computes then, if anybody's
        self.allowed = 0  # tokens of that
        # Whether sequences that had to give up their blocks for it were of the batch lane.
        self.preempted: set[bool] = set()

    def add(self, sequence: Sequence, length: int) -> None:
        last = length == sequence.remaining
        self.chunks.append(ScheduledTokens(sequence, length, last and sequence.continues))
        self.budget = max(0, self.budget - length)
        if sequence.budgeted and self._budgets is not None:
            for budget in self._budgets:
                budget.charge(sequence, length)

    def most(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens of a sequence that is `budgeted` it may compute."""
        if self._budgets is None:
            self._budgets = [one.budget() for one in self._features if one.budget]
        for budget in self._budgets:
            length = budget.most(sequence, length)
        return length

    def refuse(self, sequence: Sequence) -> list[PlaceClaims]:
        """What keeps a sequence that waits from a place."""
        if self._claims is None:
            self._claims = [one.claims() for one in self._features if one.claims]
        return [claims for claims in self._claims if not claims.admits(sequence)]

    def has(self, sequence: Sequence) -> bool:
        """Whether the step computes something of `sequence`, or restores some of its blocks."""
        return sequence.in_flight or any(chunk.sequence is sequence for chunk in self.chunks)

    def takes(self, sequence: Sequence) -> bool:
        """Whether it is one of those that this step is for."""
        return not sequence.alone if self.only is None else sequence is self.only

    def admits(self, sequence: Sequence) -> bool:
        """A sequence that has just given up its blocks must not take them back in the same step."""
        if not self.takes(sequence):
            return False
        return not (False in self.preempted or (sequence.is_batch and self.preempted))


class StepPlanner:
    """Owns the two queues of a ring, both in order of urgency, and fills steps from them."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings, tables: BlockTables) -> None:
        self._spec = spec
        self._settings = settings
        self._tables = tables
        self.features: Collection[StepFeature] = ()  # set before the first step
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Of those that run: the chunk that each of their decodes is.
        self._decodes: dict[Sequence, ScheduledTokens] = {}
        # Of those that run: the row that each of their chunks without drafts is sampled in.
        self.rows: dict[Sequence, SampledRow] = {}
        self.admitted: list[Sequence] = []  # who has got a place since this was last taken
        self.preemptions = 0  # sequences that have had to give up their blocks
        self.isolates = False  # whether some sequence may have to be computed alone
        # Whether the last step had decodes that somebody waits for, so that long prompts share its time.
        self.paced = False
        self.shared = False  # whether it computes a part of one then
        self.timed = False  # whether `took` wants to know what the last step took
        stretch, gap = settings.prefill_stretch, settings.prefill_gap
        self._pace = PrefillPace(stretch, gap) if stretch else None
        self._long = 0  # how many of those that run have begun with a long prompt
        self._planned = 0
        self._turn = 0
        self._was_alone = False

    def plan(self) -> list[ScheduledTokens]:
        """The next step's chunks. Their tables cover what they compute."""
        step = _Step(self._settings.max_batch_tokens, self.features)
        for step.only in self._turns() if self.isolates else (None,):
            for batch_lane in (False, True):
                self._add_decodes(step, batch_lane)
                if self._pace is not None and not batch_lane:
                    step.paced = bool(step.chunks)
                    if step.paced and self._long:
                        self._share_time(step, self._pace)
                self._add_prefills(step, batch_lane)
            self.paced, self.shared = step.paced, step.turn is not None and step.allowed > 0
            self.timed = self._pace is not None and (
                self._long > 0 or not self._pace.knows_decodes or not self._planned % TIMED_EVERY
            )
            self._planned += 1
            if step.chunks:
                self._was_alone = step.only is not None
                if step.only is not None:
                    self._takes_turn(step.only)
                break
        return step.chunks

    def _turns(self) -> list[Sequence | None]:
        """For whom the next step may be, the first that can be computed: those that are computed alone take turns
        with each other, and all of them with the others (None)."""
        head = self._first(_Step(0, self.features))
        alone = sorted((s for s in (*self.running, head) if s and s.alone), key=attrgetter("turn"))
        self.isolates = bool(alone) or any(s.alone for s in self.waiting)
        return [None, *alone] if self._was_alone else [*alone, None]

    def _takes_turn(self, sequence: Sequence) -> None:
        self._turn += 1
        sequence.turn = self._turn

    def took(self, batch: Collection[ScheduledTokens], seconds: float) -> None:
        """A step of `batch`, whose sequences have not moved on yet, took `seconds`; 0: nobody knows."""
        assert self._pace is not None, "nobody wants to know"
        prompts = [(c.sequence.num_computed, c.length) for c in batch if c.length > 1 or not c.samples]
        rows = sum([c.length + len(c.drafts) for c in batch]) - sum([length for _, length in prompts])
        self._pace.observe(rows, prompts, seconds)

    def keeps_waiting(self, sequence: Sequence) -> int:
        """Tokens of a running sequence's prompt that lie before a new request's: of one that shares the time with
        decodes not more than a step's."""
        if sequence.is_long and self.paced:
            return min(sequence.remaining, self._settings.max_batch_tokens)
        return sequence.remaining

    def could_admit(self) -> bool:
        """Whether the first that waits, of those that no feature keeps from it, would get a place now, were a step
        planned."""
        head = self._first(_Step(0, self.features))
        if head is None:
            return False
        lent = [] if head.is_batch else self._running_in(batch_lane=True)
        if lent and self._tables.could_allocate(head, self.running, lent):
            return True
        return self._place(head) is not None

    def take_admitted(self) -> list[Sequence]:
        admitted, self.admitted = self.admitted, []
        return admitted

    def wait(self, sequence: Sequence) -> None:
        self.isolates = self.isolates or sequence.alone
        insort(self.waiting, sequence, key=URGENCY)

    def preempt(self, sequence: Sequence) -> None:
        """Its tokens stay; what is still cached or spilled when its turn comes again is not computed again."""
        self.leave(sequence)
        sequence.preempted = True
        self._tables.free(sequence, wanted=True)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=URGENCY)
        self.preemptions += 1

    def leave(self, sequence: Sequence) -> None:
        """It runs no more."""
        self.running.remove(sequence)
        self._decodes.pop(sequence, None)
        self.rows.pop(sequence, None)
        self._long -= sequence.is_long
        for feature in self.features:
            if feature.left is not None:
                feature.left(sequence)

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold. For tests, and for idle moments."""
        for sequences in (self.waiting, self.running):
            assert sequences == sorted(sequences, key=URGENCY), "a queue is out of order"
        assert len(self.running) <= self._settings.max_sequences, "too many sequences run"
        assert self._long == sum(s.is_long for s in self.running), "long prompts are counted wrongly"
        known = self._decodes.keys() | self.rows.keys()
        assert known <= set(self.running), "what was made for a sequence is kept behind its end"
        for feature in self.features:
            if feature.check is not None:
                feature.check(self.running)

    def _running_in(self, batch_lane: bool) -> list[Sequence]:
        """Those of the batch lane, or all others."""
        first = bisect_left(self.running, _BATCH, key=URGENCY)
        return self.running[first:] if batch_lane else self.running[:first]

    # --- decodes ---------------------------------------------------------------------------------

    def _add_decodes(self, step: _Step, batch_lane: bool) -> None:
        """One token for every running sequence of the lanes that has only one to compute."""
        running, only, running_state = self._running_in(batch_lane), step.only, SequenceState.RUNNING
        size, compresses = self._spec.block_size, self._spec.num_quantized > 0
        for sequence in running:  # a step is mostly this: without a call for each
            if not step.budget:
                return
            length = len(sequence.tokens)
            if length - sequence.num_computed != 1 or sequence.state is not running_state:
                continue
            if sequence.alone if only is None else sequence is not only:
                continue
            if sequence.budgeted and not step.most(sequence, 1):
                continue
            if (sequence.restoring or sequence.snapshot) and not self._tables.restore(sequence):
                continue
            lacks = len(sequence.table) * size < length or (
                compresses and length // size > sequence.num_sealed + len(sequence.quantized)
            )  # one in a block's tokens of those that decode
            if lacks and not self._grow(step, sequence):
                continue
            if sequence.budgeted:
                step.add(sequence, 1)
                continue
            chunk = self._decodes.get(sequence)
            if chunk is None:
                chunk = self._decodes[sequence] = ScheduledTokens(sequence, 1, sequence.continues)
            step.chunks.append(chunk)
            step.budget -= 1

    def _grow(self, step: _Step, sequence: Sequence) -> bool:
        """Sees that the table covers all tokens; False when the sequence itself had to give up its blocks.

        Victims come from the end of the order of urgency, so they are not in the step yet.
        """
        while not self._tables.ensure_slots(sequence, len(sequence.tokens)):
            victim = self.running[-1]
            if victim.in_flight:
                return False  # the step brings back what it begins with
            self._preempt_for(step, victim)
            if victim is sequence:
                return False
        return True

    # --- prompts ---------------------------------------------------------------------------------

    def _share_time(self, step: _Step, pace: PrefillPace) -> None:
        """Decides whose long prompt the step computes beside its decodes, and how many tokens of it. One of the batch
        lane's only where there is no other."""
        long = [s for s in self.running if s.is_long and s.remaining > 1 and step.takes(s)]
        if not long:
            return
        step.turn = turn = min(long, key=lambda sequence: (sequence.is_batch, sequence.turn))
        decodes = sum(s.remaining == 1 for s in self.running)
        step.allowed = pace.tokens(decodes, turn.num_computed, turn.remaining)
        if step.allowed:
            self._takes_turn(turn)

    def _add_prefills(self, step: _Step, batch_lane: bool) -> None:
        """Fills the token budget with prompts of the lanes, most urgent first. An admitted one may need one
        token only."""
        prefills = []
        if len(step.chunks) < len(self.running):  # else all of them decode
            running = reversed(self._running_in(batch_lane))
            prefills = [s for s in running if len(s.tokens) - s.num_computed > 1 and step.takes(s)]
        admitting = True
        while step.budget:
            while prefills and prefills[-1].state is not SequenceState.RUNNING:
                prefills.pop()
            head = self._head(step, batch_lane) if admitting and self.waiting else None
            if head is not None and (head.is_batch != batch_lane or not step.admits(head)):
                head = None
            if head is not None and (not prefills or head.urgency < prefills[-1].urgency):
                admitting = self._admit(step, head)
                if not admitting:
                    continue
                sequence = head
            elif prefills:
                sequence = prefills.pop()
            else:
                return
            length = self._prefill(step, sequence)
            if length:
                step.add(sequence, length)
            if not (step.paced and sequence.is_long):  # nobody waits for what comes slowly
                step.before.append(sequence)

    def _prefill(self, step: _Step, sequence: Sequence) -> int:
        """How many tokens of a prompt the step computes; 0 when it has to wait.

        What one of those before it is about to compute as well, it waits for, to share it then.
        """
        if sequence.begins_later and not self._tables.restore(sequence):
            return 0
        if step.paced and sequence.is_long and not (sequence is step.turn and step.allowed):
            return 0  # the step has no time for it
        self._tables.share_more(sequence)
        if self._tables.is_being_computed(sequence, step.before):
            return 0
        end = self._end_within(step, sequence)
        if end == sequence.num_computed:
            return 0
        while not self._tables.ensure_slots(sequence, end):
            covered = self._tables.slots(sequence)
            if covered > sequence.num_computed and not self._spec.whole_prompts:
                return covered - sequence.num_computed
            victim = self.running[-1]
            if victim is sequence or step.has(victim):
                return 0  # those in the step advance, and will end or give up their blocks
            self._preempt_for(step, victim)
        return end - sequence.num_computed

    def _end_within(self, step: _Step, sequence: Sequence) -> int:
        """How far of a prompt the step may compute: its tokens before that position."""
        room = step.budget
        if self._spec.whole_prompts and sequence.remaining > room:
            if step.chunks:
                return sequence.num_computed
            room = sequence.remaining  # the step is its own: it is never cut
        if step.paced and sequence.is_long:
            room = min(room, step.allowed)
        length = min(sequence.remaining, room)
        return sequence.num_computed + (step.most(sequence, length) if sequence.budgeted else length)

    # --- places ----------------------------------------------------------------------------------

    def _first(self, step: _Step) -> Sequence | None:
        """The most urgent of those that wait and that no feature keeps from a place, or that can have one if sequences
        of the batch lane give up theirs. What waits before it has its claims."""
        while step.passed < len(self.waiting):
            sequence = self.waiting[step.passed]
            step.refusing = step.refuse(sequence)
            if not step.refusing or (not sequence.is_batch and self._lenders(step, sequence)):
                return sequence
            step.passed += 1
        return None

    def _head(self, step: _Step, batch_lane: bool) -> Sequence | None:
        """As `_first`; before the batch lane is looked at, what only that uses is made free for others."""
        head = self._first(step)
        if head is None or not step.refusing:
            return head
        lent = self._lenders(step, head)
        if batch_lane or not step.admits(head) or not self._tables.could_allocate(head, self.running, lent):
            return None
        for sequence in lent:
            self._preempt_for(step, sequence)
        for claims in step.refusing:
            claims.withdraw(head)
        return head

    def _lenders(self, step: _Step, sequence: Sequence) -> list[Sequence]:
        """The sequences of the batch lane without which a feature would let `sequence` in; none: that would not help,
        or several features keep it out."""
        if len(step.refusing) > 1:
            return []
        return step.refusing[0].lenders(sequence, self._running_in(batch_lane=True))

    def _admit(self, step: _Step, sequence: Sequence) -> bool:
        """Moves the first waiting sequence into the batch, where there is room for all tokens it has."""
        found = self._place(sequence)
        if found is None:
            found = self._make_way(step, sequence)
        if found is None:
            return False
        self._tables.admit(sequence, found)
        for feature in self.features:
            if feature.admitted is not None:
                feature.admitted(sequence)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=URGENCY)
        sequence.state = SequenceState.RUNNING
        # Whether its prompt needs more than one step, and may be cut.
        sequence.is_long = sequence.remaining > self._settings.max_batch_tokens and not self._spec.whole_prompts
        self._long += sequence.is_long
        if sequence.is_long and not sequence.alone:
            self._takes_turn(sequence)
        self.admitted.append(sequence)
        return True

    def _place(self, sequence: Sequence) -> PrefixMatch | None:
        """What is in the cache of a waiting sequence's beginning; None when there is no room for it now."""
        if len(self.running) >= self._settings.max_sequences:
            return None
        return self._tables.can_allocate(sequence, self.running)

    def _make_way(self, step: _Step, sequence: Sequence) -> PrefixMatch | None:
        """Sequences of the batch lane, the last first, give up their places to a more urgent one, unless all
        of theirs would not be enough. Returns its place."""
        lent = self._running_in(batch_lane=True)
        if sequence.is_batch or not lent or not self._tables.could_allocate(sequence, self.running, lent):
            return None
        found = None
        while found is None and self.running and self.running[-1].is_batch and not self.running[-1].in_flight:
            self._preempt_for(step, self.running[-1])
            found = self._place(sequence)
        return found

    def _preempt_for(self, step: _Step, sequence: Sequence) -> None:
        self.preempt(sequence)
        step.preempted.add(sequence.is_batch)

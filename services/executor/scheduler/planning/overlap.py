"""Steps that overlap: which may be planned before the tokens of the one under way are known, its plan, and those under
way. No clock, no I/O.

    engine     [ step n ........ ][ step n+1 ...... ][ step n+2 ...... ]
    leader          plan n+1 ▸      plan n+2 ▸           a plan is there before the step before it is over
                                    take n, publish n

A step is planned ahead where all that its plan says is certain: each running sequence is in the step under way and
will have exactly one token more, whatever that is; nobody can be admitted, restored or handed over, no draft is
worth looking for, and no sequence has to give up blocks. Else the next step is planned as ever, when the one under
way is over. So texts are the same with lookahead and without.

    tokens     [ ............ t ] ?      t: the step under way computes it, and samples ?
    the plan   token id -1 - k, k the row that samples ?; position and slot of the one behind t

Two things turn up too late. A sequence may end with ? (a stop token), or have been cancelled or replaced: its row of
the later step is computed in vain and dropped, and its blocks stay its own until that step is over. A step that
fails takes the later one with it: `StepsUnderWay.drop`.

Full blocks are sealed when the step that has filled them is over, and can be found then. Where they are compressed
that step does it, so the later one reads them under their quantized ids, as it would without lookahead.

`StepsUnderWay` has those that were scheduled and are not over: none, one, or two, the later planned ahead.

    schedule ──▶ oldest ──close──▶          the engine computes them in this order, and they are closed in it
    schedule_ahead ──▶ later ──▶ oldest

What is in a step keeps its blocks until the step is closed, whatever becomes of it: the ranks still write to them.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from services.executor.core.engine import SampledToken
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.planning.step_planner import StepPlanner
from services.executor.scheduler.sequence import Ending, Sequence, SequenceState
from services.executor.scheduler.steps import NO_STEP, SampledRow, ScheduledTokens, Step, compressions_of, table_of


class Successor(NamedTuple):
    """A sequence of the step under way that the later step goes on with."""

    sequence: Sequence
    row: int  # of the step under way: it samples the token that the later step computes
    position: int  # of that token
    chunk: ScheduledTokens  # what the later step computes of it


class OverlapScheduling:
    """Decides whether a step may be planned ahead."""

    def __init__(self, tables: BlockTables, planner: StepPlanner, drafter: Drafter) -> None:
        self._tables = tables
        self._planner = planner
        self._drafter = drafter

    def after(self, step: Step) -> list[Successor]:
        """What the step after `step`, the only one under way, computes; their tables cover it. Empty: it cannot be
        planned yet, or there is nothing certain to compute."""
        planner, tables = self._planner, self._tables
        if planner.isolates:
            return []  # of two steps under way nobody could tell which has killed the ring
        if len(step.rows) != len(step.batch) or tables.restoring or not tables.exchange.quiet:
            return []  # drafts, prompts that go on or are wanted as vectors; copies that may fail, or come in parts
        found = self._successors(step)
        if not found or (planner.waiting and (len(found) < len(planner.running) or planner.could_admit())):
            return []
        if not self._drafter.may_rest([one.sequence for one in found]):
            return []
        return found if tables.ensure_slots_ahead([(one[0], one[2]) for one in found]) else []

    def _successors(self, step: Step) -> list[Successor]:
        """Empty where one of them cannot be foreseen."""
        found, ended = [], 0
        for row, chunk in enumerate(step.sampled):
            sequence, length, _, _ = chunk
            if sequence.state is not SequenceState.RUNNING:
                ended += 1  # while this step was under way
                continue
            longer = len(sequence.tokens) + 1
            if sequence.ending is not Ending.NONE or longer >= sequence.most_tokens:
                continue  # it is over with one more token, whatever that is
            if not sequence.sampling.foreseeable:
                return []
            if length > 1:
                chunk = ScheduledTokens(sequence, 1, samples=True)
            found.append(Successor(sequence, row, sequence.num_computed + length, chunk))
        return found if len(step.sampled) - ended == len(self._planner.running) else []


def step_ahead(successors: Seq[Successor]) -> Step:
    chunks = [one.chunk for one in successors]
    return Step(
        chunks, chunks, [SampledRow(one.sequence, one.sequence.sampling.later()) for one in successors], ahead=True
    )


def plan_ahead(step: int, successors: Seq[Successor], copies: Copies, block_size: int) -> StepPlan:
    """The plan of `step_ahead`: one token of each, in their order. Their tables cover it."""
    positions = np.array([one.position for one in successors], np.int32)
    tables = [
        (
            table_of(sequence, position + 1, block_size)
            if sequence.quantized
            else sequence.table[: position // block_size + 1]
        )
        for sequence, _, position, _ in successors
    ]
    last = np.array([table[-1] for table in tables], np.int32)
    filled = [(one.sequence, one.position, one.position + 1) for one in successors if one.sequence.quantized]
    return StepPlan(
        step=step,
        num_decodes=len(successors),
        token_ids=to_bytes([-1 - one.row for one in successors]),
        positions=to_bytes(positions),
        slots=to_bytes(last * np.int32(block_size) + positions % block_size),
        query_lens=to_bytes(np.ones(len(successors), np.int32)),
        context_lens=to_bytes(positions + 1),
        block_tables=to_bytes(np.frombuffer(b"".join([table.tobytes() for table in tables]), np.int32)),
        sample_rows=to_bytes(np.arange(len(successors), dtype=np.int32)),
        saves=to_bytes(copies.saves),
        compressions=compressions_of(filled, block_size),
        restores=to_bytes(copies.restores),
        save_keys=copies.keys,
    )


def drop_wasted_rows(step: Step, sampled: Seq[SampledToken]) -> tuple[Step, list[SampledToken]]:
    """A step that was planned ahead, and what it has sampled, without those who had no token for it to compute:
    they have ended, or were about to, when the step before it was over."""
    running = SequenceState.RUNNING
    kept = [
        at
        for at, (sequence, _, _, _) in enumerate(step.batch)
        if sequence.state is running and len(sequence.tokens) - sequence.num_computed == 1
    ]
    if len(kept) == len(step.batch):
        return step, list(sampled)
    chunks = [step.batch[at] for at in kept]
    rows = [step.rows[at] for at in kept]
    return step._replace(batch=chunks, sampled=chunks, rows=rows), [sampled[at] for at in kept]


class StepsUnderWay:
    def __init__(self, tables: BlockTables, planner: StepPlanner) -> None:
        self._tables = tables
        self._planner = planner
        self.oldest = NO_STEP
        self.later = NO_STEP

    @property
    def newest(self) -> Step:
        return self.oldest if self.later is NO_STEP else self.later

    @property
    def alone(self) -> bool:
        return self.oldest is not NO_STEP and self.later is NO_STEP

    def begin(self, step: Step) -> None:
        """`step` has been planned, and is about to be sent."""
        for chunk in step.batch:
            chunk.sequence.in_flight = True
        if self.oldest is NO_STEP:
            self.oldest = step
        else:
            self.later = step

    def close(self, failed_slots: Collection[int] = (), *, computed: bool = True) -> Step:
        """The oldest is over; it is returned. `computed`: what it has computed counts."""
        step, self.oldest, self.later = self.oldest, self.later, NO_STEP
        over = [chunk.sequence for chunk in step.batch]
        for sequence in over:
            sequence.in_flight = False
        if self.oldest is not NO_STEP:
            for chunk in self.oldest.batch:
                chunk.sequence.in_flight = True
            over = [sequence for sequence in over if not sequence.in_flight]
        for sequence in over:
            if sequence.state is SequenceState.ENDED:
                self._tables.free(sequence)
        self._tables.free_unused(over)
        for sequence in self._tables.close(failed_slots, computed=computed):
            self._planner.preempt(sequence)
        return step

    def drop(self, failed_slots: Collection[int] = ()) -> Step:
        """All are over, and nothing that they have computed counts: it is computed again. Returns the oldest."""
        dropped = [self.close(failed_slots, computed=False)]
        if self.oldest is not NO_STEP:
            dropped.append(self.close(computed=False))
        if not failed_slots:  # else nothing was computed
            for sequence in [chunk.sequence for step in dropped for chunk in step.batch]:
                if sequence.state_slot >= 0:  # its state has gone on
                    self._planner.preempt(sequence)
        return dropped[0]

    @property
    def ended(self) -> list[Sequence]:
        """Sequences that have ended and still have their blocks."""
        return [chunk.sequence for chunk in self.oldest.batch if chunk.sequence.state is SequenceState.ENDED]

"""Draft models and draft heads, whose proposals the engine computes, in rounds (`Engine.draft`; docs/adr/0033).

They are asked before the step is planned, for k tokens of each sequence that takes part:

    round    first pass   [ (s) t ]  -> d1          s: tokens that it has not computed yet, mostly none
             pass k + 1   [ dk ]     -> d(k + 1)    in the slots that the step will write for dk

k has the largest E / C of all (`speculation.py`), where each further token of a sequence costs a pass, which all of
them share. Where no k pays the engine drafts nothing, and that is looked at again now and then. p(j) is what its own
probabilities for its proposals have meant so far.

`Sequence.followed` says how far it has come: it goes on behind what it has computed, within the block that is not full
yet. Rounds compute what decodes need; a step is `followed` for prompts, and where a block would be full that it lacks a
token of. A sequence that is left out while it does not pay has lost its chance: it would have to be computed again.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

from services.executor.core.engine import DraftPlan, DraftToken
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.drafts.proposer import DraftingContext, Proposer, Result
from services.executor.scheduler.drafts.speculation import Offer, Rate, StepCost
from services.executor.scheduler.sequence import LOST, Sequence
from services.executor.scheduler.steps import SampledRow, ScheduledTokens, build_draft_plan, in_draft_order

_FIRST_RATE, _FIRST_WEIGHT = 0.6, 4.0  # share of its proposals that are right, before there is any experience
_PRIOR, _MEMORY, _RING_MEMORY = 8.0, 0.97, 0.99
_BUCKETS = 10  # of its own probability for what it proposes
_FIRST_PASS = 0.2  # before a pass was timed: what it takes, of a step
# Tokens per second with it, against those without it, from which it is used, and down to which.
_PAYS, _STILL_PAYS = 1.05, 1.0
_TRIAL = 16  # steps for which one that does not pay is tried again
_FIRST_REST, _LONGEST_REST = 512, 16384  # steps until then: twice as many after each trial in vain
SUNK = 1.4  # what a proposal counts for against a guess: its pass has been paid, for this very row


class AcceptanceStats:
    """How often what is proposed is what is drawn, in one sequence."""

    def __init__(self, ring: Rate) -> None:
        """It begins with those of the ring."""
        self._ring = ring
        self._own = Rate()

    @property
    def value(self) -> float:
        """Probability that the next proposal is right."""
        return self._own.value(self._ring.value(_FIRST_RATE, _FIRST_WEIGHT), _PRIOR)

    def add(self, hit: bool) -> None:
        self._own.add(hit, _MEMORY)
        self._ring.add(hit, _RING_MEMORY)


class Proposal(NamedTuple):
    """What a round has given for one sequence."""

    acceptance: AcceptanceStats
    drafted: Seq[DraftToken]
    sampled: bool  # whether the sequence's temperature is above 0

    def tokens(self, count: int) -> list[int]:
        return [one.token for one in self.drafted[:count]]


class DraftPolicy:
    """Whether the engine drafts, and how much: as long as it pays."""

    def __init__(self, most: int, cost: StepCost) -> None:
        """`most`: proposals for one sequence at most; `cost`: of the steps of the model that is served."""
        self._most = most
        self._cost = cost
        self._ring = Rate()
        # By whether the sequence is sampled, and its own probability: how many were right.
        self._meant = [[Rate() for _ in range(_BUCKETS)] for _ in range(2)]
        self._passes = StepCost()
        self._rest, self._rested, self._trial = _FIRST_REST, 0, _TRIAL
        self.used = True  # whether it keeps up with what steps compute, and proposes

    def acceptance(self) -> AcceptanceStats:
        """For a sequence that begins."""
        return AcceptanceStats(self._ring)

    @property
    def trial(self) -> bool:
        """Whether it is used to see whether it would pay, and not because it does."""
        return self._trial > 0

    def takes_on(self, stats: AcceptanceStats, decodes: int) -> bool:
        """Whether a sequence with this experience is worth a pass, in a step of `decodes` sequences."""
        return self.trial or self._gain(1, decodes, decodes, stats.value) >= _STILL_PAYS

    def count(self, decodes: int, stats: Seq[AcceptanceStats], most: int) -> int:
        """How many tokens to propose for each of these sequences, `most` at most, in a step of `decodes` sequences; 0:
        none."""
        right = sum(one.value for one in stats) / max(1, len(stats))
        best, count = (0.0 if self.trial else 1.0), 0
        for k in range(1, min(most, self._most) + 1 if self._cost.has_observations else 1):
            gain = self._gain(k, decodes, len(stats), right)
            if gain <= best:
                break  # each further token brings less than the one before it, and costs as much
            best, count = gain, k
        return count

    def chances(self, proposal: Proposal, least: float) -> list[float]:
        """For j from 1: the probability that the first j proposals are all right, while it is above `least`."""
        usual = proposal.acceptance.value / max(self._ring.value(_FIRST_RATE, _FIRST_WEIGHT), 1e-3)
        chances: list[float] = []
        chance = 1.0
        for one in proposal.drafted:
            bucket = _bucket(one.probability)
            meant = self._meant[proposal.sampled][bucket].value((bucket + 0.5) / _BUCKETS, _FIRST_WEIGHT)
            chance *= min(1.0, usual * meant)
            if chance <= least:
                break
            chances.append(chance)
        return chances

    def learn(self, proposal: Proposal, drawn: Seq[int]) -> int:
        """`drawn` are the tokens where `proposal` was made. Returns how many of its tokens were right, one after the
        other."""
        for right, (one, token) in enumerate(zip(proposal.drafted, drawn, strict=False)):
            hit = one.token == token
            proposal.acceptance.add(hit)
            self._meant[proposal.sampled][_bucket(one.probability)].add(hit, _RING_MEMORY)
            if not hit:
                return right
        return min(len(proposal.drafted), len(drawn))

    def proposed(self, passes: int, sequences: int, seconds: float) -> None:
        """So many passes over `sequences` sequences took `seconds` in all."""
        self._passes.observe(sequences, seconds / max(1, passes))

    def without_following(self, seconds: float, rows: int) -> float:
        """What a step of so many rows would have taken, had it not computed them too."""
        following = (
            self._passes.of(rows) if self._passes.has_observations else seconds * _FIRST_PASS / (1 + _FIRST_PASS)
        )
        return max(seconds - following, seconds / 2)

    def step_over(self, running: int) -> None:
        """A step is over, of a batch of `running` sequences: decides on the next ones."""
        if not running or not self._cost.has_observations:
            return
        right = self._ring.value(_FIRST_RATE, _FIRST_WEIGHT)
        gain = max(self._gain(k, running, running, right) for k in (1, 2, 4))
        pays = gain >= (_STILL_PAYS if self.used and not self.trial else _PAYS)
        if self.trial:
            self._trial -= 1
            if pays:
                self._rest, self._trial = _FIRST_REST, 0
            elif not self._trial:
                self._rest, self._rested = min(2 * self._rest, _LONGEST_REST), 0
        elif not pays:
            self._rested = 0 if self.used else self._rested + 1
            self._trial = _TRIAL if self._rested >= self._rest else 0
        self.used = pays or self._trial > 0

    def _gain(self, count: int, decodes: int, drafting: int, right: float) -> float:
        """Tokens per second of a step where `drafting` of its `decodes` sequences have `count` proposals, of which each
        is right with this probability, against those of a step without."""
        plain = self._cost.of(decodes)
        draft = self._passes.of(drafting) if self._passes.has_observations else _FIRST_PASS * plain
        expected = decodes + drafting * sum(right**j for j in range(1, count + 1))
        seconds = self._cost.of(decodes + drafting * count) + count * draft
        return expected / seconds / (decodes / plain) if plain else 1.0


class EngineCounts:
    """What the engine has drafted since the ring has started."""

    def __init__(self) -> None:
        self.drafted = 0  # of the drafts that were checked, those that it has proposed
        self.accepted = 0  # of these, what was put out
        self.passes = 0
        self.seconds = 0.0  # of its rounds


class EngineDrafts(Proposer):
    """A `Proposer` whose proposals the engine computes: what it proposes, and how far it has come."""

    def __init__(self, name: str, context: DraftingContext) -> None:
        self.name = name
        self._spec = context.spec
        self._budget = context.settings.max_batch_tokens
        self._most = context.most
        self._limit = context.limit
        self.policy = DraftPolicy(context.settings.max_drafts, context.cost)
        self.counts = EngineCounts()
        self.members: list[Sequence] = []  # of the round that is under way
        self._passes = 0
        # What the last round has given, until the step behind it is over.
        self.proposals: dict[Sequence, Proposal] = {}

    @property
    def expects(self) -> bool:
        return bool(self.proposals)

    @property
    def used(self) -> bool:
        """Whether it keeps up with what steps compute, and proposes: as long as it pays."""
        return self.policy.used

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], least: float, skipped: int) -> list[Offer | None]:
        if not self.proposals:
            return [None] * len(sequences)
        return [self._offer(*one, least / SUNK) for one in zip(sequences, limits, strict=True)]

    def _offer(self, sequence: Sequence, limit: int, least: float) -> Offer | None:
        """What the last round has given for a sequence, as far as its grammar lets it follow."""
        proposal, grammar = self.proposals.get(sequence), sequence.sampling.grammar
        if proposal is None:
            return None
        if grammar is not None:
            fitting = grammar.fitting(proposal.tokens(len(proposal.drafted)))
            proposal = proposal._replace(drafted=proposal.drafted[:fitting])
        chances = self.policy.chances(proposal, least)[:limit]
        return Offer(proposal.tokens(len(chances)), chances, SUNK) if chances else None

    def must_look(self, sequences: Seq[Sequence]) -> bool:
        return self.used and any(self._keeps_up(sequence, len(sequences)) for sequence in sequences)

    def learn(self, results: Seq[Result]) -> None:
        for sequence, drafts, drawn in results:
            proposal = self.proposals.get(sequence)
            if proposal is None:
                continue
            if proposal.tokens(len(drafts)) == list(drafts):
                self.counts.drafted += len(drafts)
                self.counts.accepted += len(drawn) - 1
            right = self.policy.learn(proposal, drawn)
            before = len(sequence.tokens) - len(drawn)
            known = min(before + min(right, len(proposal.drafted) - 1), sequence.num_computed)
            sequence.followed = self._computed_for_good(before, known, sequence.num_computed)

    def _computed_for_good(self, before: int, known: int, computed: int) -> int:
        """How many tokens it need not compute again: of `known`, those behind `before` were its own proposals;
        `computed`: by the model that is served."""
        return known

    # --- rounds ----------------------------------------------------------------------------------

    def begin_round(
        self, running: Collection[Sequence], tables: BlockTables, is_sure: Callable[[Sequence], bool]
    ) -> int:
        """Chooses the `members` of a round before the next step, and makes room for their proposals. Returns how many
        these are to be of each; 0: there is no round. `is_sure`: of the sequences for which others propose."""
        self.proposals = {}
        decodes = [s for s in running if s.remaining == 1 and not s.begins_later]
        ready = [s for s in decodes if self._takes_part(s, len(decodes), is_sure)]
        if not ready:
            return 0
        budget = self._budget
        limits = [self._limit(sequence) for sequence in ready]
        most = min(max(limits), min(self._most, budget - len(decodes)) // len(ready))
        count = self.policy.count(len(decodes), [self._acceptance(s) for s in ready], most)
        for sequence in ready if count else ():
            budget -= len(sequence.tokens) - sequence.followed
            room = min(self._spec.context_length, self._spec.capacity) - len(sequence.tokens)
            if budget >= 0 and room >= count and tables.ensure_draft_slots(sequence, count, running) >= count:
                self.members.append(sequence)
        self._passes = count
        return count if self.members else 0

    def draft_plan(self, step: int, copies: Copies) -> tuple[DraftPlan, list[SampledRow]]:
        """The plan of the round that has begun, which takes the numbers from `step` on."""
        return build_draft_plan(step, self.members, self._passes, copies, self._spec.block_size)

    def take_round(self, found: Seq[Seq[DraftToken]], seconds: float) -> list[Sequence]:
        """Ends the round: `found` for each of the plan's rows, after so many seconds (0: nobody knows). Returns its
        members."""
        members, self.members = in_draft_order(self.members), []
        for sequence, drafted in zip(members, found, strict=True):
            sequence.followed = sequence.num_computed  # its last token counts once the step has computed it
            if drafted:
                sampled = not sequence.sampling.greedy
                self.proposals[sequence] = Proposal(self._acceptance(sequence), drafted, sampled)
        self.policy.proposed(self._passes, len(members), seconds)
        self.counts.passes += self._passes
        self.counts.seconds += seconds
        return members

    def drop_round(self) -> list[Sequence]:
        """Ends the round without a result: the engine drafts no more for its members. Returns these."""
        members, self.members = self.members, []
        for sequence in members:
            sequence.followed = LOST
        return members

    def forget(self) -> None:
        """The step that the proposals were for has failed."""
        self.proposals = {}

    # --- steps -----------------------------------------------------------------------------------

    def follows(self, batch: Seq[ScheduledTokens]) -> bool:
        """Whether it is to compute the rows of a step too (`StepPlan.followed`): else it would be behind for good
        with some sequence."""
        return self.used and any(self._would_lack(chunk, len(batch)) for chunk in batch)

    def checkable(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """How many of `drafts`, whoever has proposed them, may be checked without leaving it behind: its last proposal
        it has not computed, and without it a block would be full that it lacks a token of."""
        count, end = len(drafts), len(sequence.tokens) + len(drafts)
        fills = self._full(end) == end and self._is_own(sequence, drafts)
        return count - (fills and end > self._known(sequence, drafts))

    def step_over(self, running: int) -> None:
        """A step is over, of a batch of `running` sequences."""
        self.proposals = {}
        self.policy.step_over(running)

    def _acceptance(self, sequence: Sequence) -> AcceptanceStats:
        stats: AcceptanceStats | None = sequence.proposing.get(self.name)
        if stats is None:
            stats = sequence.proposing[self.name] = self.policy.acceptance()
        return stats

    def _keeps_up(self, sequence: Sequence, decodes: int) -> bool:
        """Whether it can go on with a sequence, and that is likely to pay."""
        if not sequence.speculates or not sequence.continues:
            return False
        if sequence.followed < sequence.num_sealed * self._spec.block_size:
            return False  # nothing can be written to a block that is full
        return self.policy.takes_on(self._acceptance(sequence), decodes)

    def _takes_part(self, sequence: Sequence, decodes: int, is_sure: Callable[[Sequence], bool]) -> bool:
        """Whether a decode takes part in the round before its next step. Where another proposer is sure of it the step
        is followed instead."""
        spared = is_sure(sequence) and sequence.is_followed
        return not spared and self._limit(sequence) > 0 and self._keeps_up(sequence, decodes)

    def _would_lack(self, chunk: ScheduledTokens, decodes: int) -> bool:
        sequence = chunk.sequence
        ends = chunk.samples and chunk.length == 1 and not self._limit(sequence)  # with the next token
        if ends or not sequence.is_followed or not self._keeps_up(sequence, decodes):
            return False
        if sequence not in self.proposals:
            return True
        return self._full(chunk.end) > self._known(sequence, chunk.drafts)

    def _known(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """Up to which position it has computed the tokens of a member of the last round, and then `drafts`."""
        behind = len(self.proposals[sequence].drafted) - 1 if self._is_own(sequence, drafts) else 0
        return len(sequence.tokens) + behind

    def _is_own(self, sequence: Sequence, drafts: Seq[int]) -> bool:
        proposal = self.proposals.get(sequence)
        return proposal is not None and proposal.tokens(len(drafts)) == list(drafts)

    def _full(self, tokens: int) -> int:
        """How many of the first so many tokens are in full blocks."""
        return tokens // self._spec.block_size * self._spec.block_size


def _bucket(probability: float) -> int:
    return min(_BUCKETS - 1, max(0, int(probability * _BUCKETS)))

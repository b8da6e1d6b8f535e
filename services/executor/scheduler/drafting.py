"""Drafts in the batch: which of its decodes carry some, and what a step with drafts has given.

    tokens   [ ................ t ]            t: the last token, whose logits give the next one
    step                      [ t | d1 d2 d3 ]  drafts: rows of the batch, slots in blocks of their own
    drawn                       r0  r1 r2 r3    r0 = d1, r1 = d2, r2 ≠ d3: r0 r1 r2 are put out, and the
                                                cache holds t, d1 and d2; the slot of d3 is written again

Drafts take what is left of the step's token budget and blocks that nobody needs, after everything else.
Tokens are put out as if they had come one by one: an end in the middle cuts what follows.

Where the ring has a draft model, a round of it comes before a step is planned (docs/adr/0033):

    round    first pass   [ (s) t ]  -> d1          s: tokens that it has not computed yet, mostly none
             pass k + 1   [ dk ]     -> d(k + 1)    in the slots that the step will write for dk

`Sequence.followed` says how far it has come: it goes on behind what it has computed, within the block that is not full
yet. Rounds compute what decodes need; a step is `followed` for prompts, and where a block would be full that the draft
model lacks a token of. A sequence that is left out while the draft model does not pay has lost its chance: it would
have to be computed again.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from services.executor.core.engine import DraftPlan, DraftToken, EngineSpec, SampledToken
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.sequence import LOST, Ending, Sequence
from services.executor.scheduler.speculation import Agreement, DraftModel, Guesser, Proposal, Speculation
from services.executor.scheduler.steps import Chunk, Row, Step, build_draft_plan, in_draft_order

_KEEP = 0.9
_WORTH = 0.1
"""Drafts put out per decode from which they are worth more than planning ahead: what that saves is some share of a
step."""
MASK_BYTES = 32 << 20
"""Of the masks of all rows behind drafts in a step: a byte for each token of the vocabulary."""
_RUN = 15
"""Steps in a row that may go without a look for drafts: a text that begins to repeat itself is seen by then."""


@dataclass(slots=True)
class ModelCounts:
    """What the draft model has done since the ring has started."""

    drafted: int = 0
    """Of the drafts that were computed, those that it has proposed."""
    accepted: int = 0
    """Of these, what was put out."""
    passes: int = 0
    seconds: float = 0.0
    """Of its rounds."""


class Drafter:
    """Adds drafts to the decodes of a batch. No clock, no I/O."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings) -> None:
        self._spec = spec
        self._capacity = spec.capacity
        self._settings = settings
        self._most = spec.draft_states if spec.num_states else settings.max_batch_tokens
        """Drafts of a step at most: where the model keeps recurrent state, as many as there are slots for."""
        self._speculation = Speculation(settings.max_drafts)
        self.has_model = spec.drafts and settings.max_drafts > 0
        """Whether there is a draft model."""
        self.members: list[Sequence] = []
        """Of the round that is under way."""
        self._passes = 0
        self._proposals: dict[Sequence, Proposal] = {}
        """What the last round has given, until the step behind it is over."""
        self.drafted = 0
        """Drafts that were computed."""
        self.accepted = 0
        """Drafts that were put out."""
        self.model = ModelCounts()
        self._gain = 1.0
        """Drafts put out per decode, lately, in steps that could have some."""
        self._skipped = 0
        """Steps since the last one that could have drafts."""

    def extend(self, batch: list[Chunk], tables: BlockTables, running: Collection[Sequence]) -> None:
        """Gives chunks of `batch` drafts, where they are likely to pay."""
        if not self._settings.max_drafts:
            return
        places = [at for at, chunk in enumerate(batch) if chunk.length == 1 and chunk.samples]
        sequences = [batch[at].sequence for at in places]
        budget = self._settings.max_batch_tokens - sum([chunk.length for chunk in batch])
        if budget > self._most:
            budget = self._most
        if not sequences or budget <= 0:
            return
        if not self._may_pay(len(sequences)):
            for guesser in self._guessers(sequences):
                if guesser.guesses:
                    guesser.forget()
            self._skipped = 0
            return
        guided = sum(1 for sequence in sequences if sequence.sampling.grammar is not None)
        limits = [self._limit(sequence, guided) for sequence in sequences]
        proposed = self.propose(sequences, limits, budget)
        self._skipped = 0
        for at, drafts in zip(places, proposed, strict=True):
            if drafts:
                sequence = batch[at].sequence
                count = tables.cover_drafts(sequence, self._before_gap(sequence, drafts), running)
                batch[at] = batch[at]._replace(drafts=tuple(drafts[:count]))

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        """Drafts for each sequence: `limits` of each at most, `budget` in all."""
        guessers = self._guessers(sequences)
        proposals = [self._offer(sequence) for sequence in sequences] if self._proposals else []
        return self._speculation.choose(guessers, limits, budget, self._skipped, proposals)

    def _may_pay(self, decodes: int) -> bool:
        """Whether any drafts could pay in a step of so many decodes."""
        return self._speculation.worth_looking(decodes)

    def _guessers(self, sequences: Seq[Sequence]) -> list[Guesser]:
        """Of each sequence, which has one from now on."""
        guessers = []
        for sequence in sequences:
            if sequence.guesser is None:
                sequence.guesser = self._speculation.guesser(
                    sequence.tokens, sequence.request.prediction, sequence.sampling.grammar
                )
            guessers.append(sequence.guesser)
        return guessers

    def may_rest(self, sequences: Seq[Sequence]) -> bool:
        """Whether the next step, one token of each of `sequences`, may be planned without asking for drafts. Then
        it is, or the question is asked once more."""
        if not self._settings.max_drafts:
            return True
        if self.uses_model and any(self._keeps_up(sequence, len(sequences)) for sequence in sequences):
            return False
        if self._gain >= _WORTH or self._skipped >= _RUN:
            return False
        return not any(sequence.request.prediction for sequence in sequences)

    def take(
        self, step: Step, results: Seq[SampledToken], seconds: float
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        """Moves all sequences of a step on. Returns the new tokens, already appended, of those that go on.

        `results` are aligned with the step's rows. `seconds` that it took; 0: nobody knows.
        """
        prompts = [chunk for chunk in step.batch if chunk.length > 1 or not chunk.samples]
        if not prompts:
            rows = len(step.rows)
            seconds = self._model.without_following(seconds, rows) if step.followed else seconds
            self._speculation.cost.observe(rows, seconds)
        up_to_date = [c.sequence for c in step.batch if _is_up_to_date(c.sequence)] if step.followed else []
        for chunk in prompts:
            if not chunk.samples:
                chunk.sequence.num_computed += chunk.length
        before = self.accepted
        drawn = self._take_drawn(step.sampled, results)
        for sequence in up_to_date:
            sequence.followed = sequence.num_computed
        if step.ahead:
            self._skipped += 1
        elif step.sampled:
            share = (self.accepted - before) / len(step.sampled)
            self._gain = _KEEP * self._gain + (1 - _KEEP) * share
        if self.has_model:
            self._proposals = {}
            self._model.step_over(len(step.batch))
        return drawn

    def _take_drawn(
        self, sampled: Seq[Chunk], results: Seq[SampledToken]
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        drawn: list[tuple[Sequence, list[SampledToken]]] = []
        rest, going_on = iter(results), Ending.NONE
        for chunk in sampled:
            sequence, length, _, drafts = chunk
            new = [next(rest), *islice(rest, len(drafts))] if drafts else [next(rest)]
            if sequence.ending is not going_on:
                sequence.num_computed += length
                continue
            if drafts:
                new = self._accept(chunk, new)
            else:  # nearly always: nothing to compare, and no call for each
                token, sampling = new[0].token, sequence.sampling
                sequence.tokens.append(token)
                if sampling.counts is None and sampling.bans is None and sampling.grammar is None:
                    sampling.position += 1
                else:
                    sampling.advance(token)
                sequence.num_computed += length
                guesser = sequence.guesser
                if self._proposals or (guesser is not None and guesser.guesses):
                    self._learn(sequence, [token])
                if guesser is not None:
                    guesser.copies = False
            drawn.append((sequence, new))
        return drawn

    def _accept(self, chunk: Chunk, results: list[SampledToken]) -> list[SampledToken]:
        """Appends what a chunk with drafts has given: `results` are drawn after its last token and after each draft.
        The last one of the new tokens may end the sequence."""
        sequence, length, _, drafts = chunk
        new: list[SampledToken] = []
        for result, draft in zip(results, (*drafts, None), strict=True):
            sequence.append(result.token)
            new.append(result)
            if result.token != draft or self._ends(sequence):
                break
        sequence.num_computed += length + len(new) - 1
        self._count(sequence, drafts, len(new) - 1)
        self._learn(sequence, [result.token for result in new])
        return new

    def _count(self, sequence: Sequence, drafts: tuple[int, ...], accepted: int) -> None:
        self.drafted += len(drafts)
        self.accepted += accepted
        if self._is_of_model(sequence, drafts):
            self.model.drafted += len(drafts)
            self.model.accepted += accepted
        if sequence.guesser is not None and accepted < len(drafts):
            sequence.guesser.copies = False

    def _learn(self, sequence: Sequence, drawn: list[int]) -> None:
        """`drawn` has been appended; the cache has what was computed."""
        if sequence.guesser is not None:
            sequence.guesser.learn(drawn)
        if (offer := self._proposals.get(sequence)) is not None:
            right = self._model.learn(offer, drawn)
            before = len(sequence.tokens) - len(drawn)
            known = min(before + min(right, len(offer.drafted) - 1), sequence.num_computed)
            if (
                self._spec.draft_reads_states
            ):  # behind `before` it has read its own, within a block that it can rewrite
                known = min(known, max(before, self._full(sequence.num_computed)))
            sequence.followed = known

    def _limit(self, sequence: Sequence, guided: int = 1) -> int:
        """Drafts after which the sequence may still put out one more token. `guided`: sequences with a grammar, which
        share the room for masks."""
        if not sequence.speculates:
            return 0
        output = sequence.request.max_tokens - sequence.output_tokens
        room = min(self._spec.context_length, self._capacity) - len(sequence.tokens)
        most = max(0, min(output, room, self._settings.max_drafts + 1) - 1)
        if sequence.sampling.grammar is None:
            return most
        return min(most, MASK_BYTES // self._spec.vocab_size // guided)

    def _ends(self, sequence: Sequence) -> bool:
        too_long = len(sequence.tokens) > self._capacity
        return too_long or bool(sequence.finish_reason(self._spec.context_length))

    # --- the draft model -------------------------------------------------------------------------

    def begin_round(self, running: Collection[Sequence], tables: BlockTables) -> int:
        """Chooses the `members` of a round before the next step, and makes room for their proposals. Returns how many
        these are to be of each; 0: there is no round."""
        self._proposals = {}
        decodes = [s for s in running if s.remaining == 1 and not s.begins_later]
        ready = [s for s in decodes if self._takes_part(s, len(decodes))]
        if not ready:
            return 0
        budget = self._settings.max_batch_tokens
        limits = [self._limit(sequence) for sequence in ready]
        most = min(max(limits), min(self._most, budget - len(decodes)) // len(ready))
        count = self._model.count(len(decodes), [self._agreement(s) for s in ready], most)
        for sequence in ready if count else ():
            budget -= len(sequence.tokens) - sequence.followed
            room = min(self._spec.context_length, self._capacity) - len(sequence.tokens)
            if budget >= 0 and room >= count and tables.cover_drafts(sequence, count, running) >= count:
                self.members.append(sequence)
        return count if self.members else 0

    def draft_plan(self, step: int, count: int, copies: Copies) -> tuple[DraftPlan, list[Row]]:
        """The plan of the round that has begun, which takes the numbers from `step` on."""
        self._passes = count
        return build_draft_plan(step, self.members, count, copies, self._spec.block_size)

    def take_round(self, found: Seq[Seq[DraftToken]], seconds: float) -> list[Sequence]:
        """Ends the round: `found` for each of the plan's rows, after so many seconds (0: nobody knows). Returns its
        members."""
        members, self.members = in_draft_order(self.members), []
        for sequence, drafted in zip(members, found, strict=True):
            sequence.followed = sequence.num_computed  # its last token counts once the step has computed it
            if drafted:
                sampled = not sequence.sampling.greedy
                self._proposals[sequence] = Proposal(self._agreement(sequence), drafted, sampled)
        self._model.proposed(self._passes, len(members), seconds)
        self.model.passes += self._passes
        self.model.seconds += seconds
        return members

    def drop_round(self) -> list[Sequence]:
        """Ends the round without a result: the draft model is not asked for its members any more. Returns these."""
        members, self.members = self.members, []
        for sequence in members:
            sequence.followed = LOST
        return members

    def forget_proposals(self) -> None:
        """The step that they were for has failed."""
        self._proposals = {}

    def is_to_follow(self, batch: Seq[Chunk]) -> bool:
        """Whether the draft model is to compute the rows of a step too: else it would be behind for good with some
        sequence."""
        return self.uses_model and any(self._would_lack(chunk, len(batch)) for chunk in batch)

    @property
    def uses_model(self) -> bool:
        """Whether there is a draft model that is in use now."""
        return self.has_model and self._model.used

    @property
    def _model(self) -> DraftModel:
        return self._speculation.model

    def _offer(self, sequence: Sequence) -> Proposal | None:
        """What the last round has given for a sequence, as far as its grammar lets it follow."""
        offer, grammar = self._proposals.get(sequence), sequence.sampling.grammar
        if offer is None or grammar is None:
            return offer
        fitting = grammar.fitting(offer.tokens(len(offer.drafted)))
        return offer._replace(drafted=offer.drafted[:fitting])

    def _agreement(self, sequence: Sequence) -> Agreement:
        if sequence.agreement is None:
            sequence.agreement = self._model.agreement()
        return sequence.agreement

    def _keeps_up(self, sequence: Sequence, decodes: int) -> bool:
        """Whether the draft model can go on with a sequence, and that is likely to pay."""
        if not sequence.speculates or not sequence.continues:
            return False
        if sequence.followed < sequence.num_sealed * self._spec.block_size:
            return False  # nothing can be written to a block that is full
        return self._model.takes_on(self._agreement(sequence), decodes)

    def _takes_part(self, sequence: Sequence, decodes: int) -> bool:
        """Whether a decode takes part in the round before its next step. Where its own text, or its grammar, gives
        good drafts the step is followed instead."""
        guesser = sequence.guesser
        knows = guesser is not None and (guesser.copies or guesser.is_forced) and _is_up_to_date(sequence)
        return not knows and self._limit(sequence) > 0 and self._keeps_up(sequence, decodes)

    def _would_lack(self, chunk: Chunk, decodes: int) -> bool:
        sequence = chunk.sequence
        ends = chunk.samples and chunk.length == 1 and not self._limit(sequence)  # with the next token
        if ends or not _is_up_to_date(sequence) or not self._keeps_up(sequence, decodes):
            return False
        if sequence not in self._proposals:
            return True
        return self._full(chunk.end) > self._known(sequence, chunk.drafts)

    def _before_gap(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """How many of `drafts` to check: the draft model has not computed its last proposal, and without it a block
        would be full that it lacks a token of."""
        count, end = len(drafts), len(sequence.tokens) + len(drafts)
        fills = self._full(end) == end and self._is_of_model(sequence, drafts)
        return count - (fills and end > self._known(sequence, drafts))

    def _known(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """Up to which position the draft model has computed the tokens of a member of the last round, and then
        `drafts`."""
        behind = len(self._proposals[sequence].drafted) - 1 if self._is_of_model(sequence, drafts) else 0
        return len(sequence.tokens) + behind

    def _is_of_model(self, sequence: Sequence, drafts: Seq[int]) -> bool:
        offer = self._proposals.get(sequence)
        return offer is not None and offer.tokens(len(drafts)) == list(drafts)

    def _full(self, tokens: int) -> int:
        """How many of the first so many tokens are in full blocks."""
        return tokens // self._spec.block_size * self._spec.block_size


def _is_up_to_date(sequence: Sequence) -> bool:
    """Whether the draft model has computed what the model that is served has."""
    return sequence.followed == sequence.num_computed

"""Drafts in the batch: which of its decodes carry some, and what a step with drafts has given.

    tokens   [ ................ t ]            t: the last token, whose logits give the next one
    step                      [ t | d1 d2 d3 ]  drafts: rows of the batch, slots in blocks of their own
    drawn                       r0  r1 r2 r3    r0 = d1, r1 = d2, r2 ≠ d3: r0 r1 r2 are put out, and the
                                                cache holds t, d1 and d2; the slot of d3 is written again

Drafts take what is left of the step's token budget and blocks that nobody needs, after everything else.
Tokens are put out as if they had come one by one: an end in the middle cuts what follows.
Proposers make them (`proposer.py`): of each sequence the best offer counts.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from msgspec import structs

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.drafts.engine_drafts import EngineCounts, EngineDrafts
from services.executor.scheduler.drafts.proposer import DraftingContext, ProposerMaker, Result
from services.executor.scheduler.drafts.speculation import Offer, Speculation
from services.executor.scheduler.sequence import Ending, Sequence
from services.executor.scheduler.steps import ScheduledTokens, Step

_KEEP = 0.9
# Drafts put out per decode from which they are worth more than planning ahead: what that saves is some share of a
# step.
_WORTH = 0.1
# Of the masks of all rows behind drafts in a step: a byte for each token of the vocabulary.
MASK_BYTES = 32 << 20
# Steps in a row that may go without a look for drafts: a text that begins to repeat itself is seen by then.
_RUN = 15


class Drafter:
    """Adds drafts to the decodes of a batch. No clock, no I/O."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings, makers: Iterable[ProposerMaker]) -> None:
        """`makers`: of those that propose (`proposers/catalog.py`); of two offers that promise as much the earlier
        one's is taken."""
        if spec.num_states and not spec.draft_states:  # a rejected draft would need the state from before it
            settings = structs.replace(settings, max_drafts=0)
        self._spec = spec
        self._capacity = spec.capacity
        self._settings = settings
        # Drafts of a step at most: where the model keeps recurrent state, as many as there are slots for.
        self._most = spec.draft_states if spec.num_states else settings.max_batch_tokens
        self._speculation = Speculation()
        context = DraftingContext(spec, settings, self._most, self._speculation.cost, self._limit)
        made = [make(context) for make in makers] if settings.max_drafts else []
        self._proposers = [proposer for proposer in made if proposer is not None]
        # Of them, the one whose proposals the engine computes; None: there is none.
        self.engine = next((one for one in self._proposers if isinstance(one, EngineDrafts)), None)
        self.drafted = 0  # drafts that were computed
        self.accepted = 0  # drafts that were put out
        self._gain = 1.0  # drafts put out per decode, lately, in steps that could have some
        self._skipped = 0  # steps since the last one that could have drafts

    @property
    def engine_counts(self) -> EngineCounts:
        return EngineCounts() if self.engine is None else self.engine.counts

    def extend(self, batch: list[ScheduledTokens], tables: BlockTables, running: Collection[Sequence]) -> None:
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
            for proposer in self._proposers:
                proposer.pass_over(sequences)
            self._skipped = 0
            return
        guided = sum(1 for sequence in sequences if sequence.sampling.grammar is not None)
        limits = [self._limit(sequence, guided) for sequence in sequences]
        proposed = self.propose(sequences, limits, budget)
        self._skipped = 0
        for at, drafts in zip(places, proposed, strict=True):
            if drafts:
                sequence = batch[at].sequence
                count = len(drafts) if self.engine is None else self.engine.checkable(sequence, drafts)
                count = tables.ensure_draft_slots(sequence, count, running)
                batch[at] = batch[at]._replace(drafts=tuple(drafts[:count]))

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        """Drafts for each sequence: `limits` of each at most, `budget` in all."""
        best: list[Offer | None] = [None] * len(sequences)
        promised, of = [0.0] * len(sequences), [-1] * len(sequences)
        least = self._speculation.least_chance(len(sequences))
        for number, proposer in enumerate(self._proposers):
            for at, offer in enumerate(proposer.propose(sequences, limits, least, self._skipped)):
                if offer is not None and (promise := sum(offer.chances)) > promised[at]:
                    best[at], promised[at], of[at] = offer, promise, number
        for number, proposer in enumerate(self._proposers):
            proposer.chosen([sequence for sequence, by in zip(sequences, of, strict=True) if by == number])
        return self._speculation.choose(best, budget)

    def _may_pay(self, decodes: int) -> bool:
        """Whether any drafts could pay in a step of so many decodes."""
        return self._speculation.worth_looking(decodes)

    def is_sure(self, sequence: Sequence) -> bool:
        """Whether some proposer needs no other beside it for the next step of a sequence."""
        return any(proposer.is_sure(sequence) for proposer in self._proposers)

    def may_rest(self, sequences: Seq[Sequence]) -> bool:
        """Whether the next step, one token of each of `sequences`, may be planned without asking for drafts. Then
        it is, or the question is asked once more."""
        if not self._settings.max_drafts:
            return True
        if self._gain >= _WORTH or self._skipped >= _RUN:
            return False
        return not any(proposer.must_look(sequences) for proposer in self._proposers)

    def take(self, step: Step, results: Seq[SampledToken], seconds: float) -> list[tuple[Sequence, list[SampledToken]]]:
        """Moves all sequences of a step on. Returns the new tokens, already appended, of those that go on.

        `results` are aligned with the step's rows. `seconds` that it took; 0: nobody knows.
        """
        prompts = [chunk for chunk in step.batch if chunk.length > 1 or not chunk.samples]
        if not prompts:
            rows = len(step.rows)
            if step.followed and self.engine is not None:
                seconds = self.engine.policy.without_following(seconds, rows)
            self._speculation.cost.observe(rows, seconds)
        up_to_date = [c.sequence for c in step.batch if c.sequence.is_followed] if step.followed else []
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
        if self.engine is not None:
            self.engine.step_over(len(step.batch))
        return drawn

    def _take_drawn(
        self, sampled: Seq[ScheduledTokens], results: Seq[SampledToken]
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        drawn: list[tuple[Sequence, list[SampledToken]]] = []
        learners = [one for one in self._proposers if one.expects] if self._proposers else []
        learnt: list[Result] = []
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
            drawn.append((sequence, new))
            if learners:
                learnt.append(Result(sequence, drafts, [result.token for result in new]))
        for proposer in learners:
            proposer.learn(learnt)
        return drawn

    def _accept(self, chunk: ScheduledTokens, results: list[SampledToken]) -> list[SampledToken]:
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
        self.drafted += len(drafts)
        self.accepted += len(new) - 1
        return new

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

    def forget_proposals(self) -> None:
        """The step that they were for has failed."""
        if self.engine is not None:
            self.engine.forget()

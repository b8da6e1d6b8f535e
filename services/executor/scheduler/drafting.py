"""Drafts in the batch: which of its decodes carry some, and what a step with drafts has given.

    tokens   [ ................ t ]            t: the last token, whose logits give the next one
    step                      [ t | d1 d2 d3 ]  drafts: rows of the batch, slots in blocks of their own
    drawn                       r0  r1 r2 r3    r0 = d1, r1 = d2, r2 ≠ d3: r0 r1 r2 are put out, and the
                                                cache holds t, d1 and d2; the slot of d3 is written again

Drafts take what is left of the step's token budget and blocks that nobody needs, after everything else.
Tokens are put out as if they had come one by one: an end in the middle cuts what follows.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import islice

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.sequence import Ending, Sequence
from services.executor.scheduler.speculation import Speculation
from services.executor.scheduler.steps import Chunk, Step

_KEEP = 0.9
_WORTH = 0.1
"""Drafts put out per decode from which they are worth more than planning ahead: what that saves is some share of a
step."""
_RUN = 15
"""Steps in a row that may go without a look for drafts: a text that begins to repeat itself is seen by then."""


class Drafter:
    """Adds drafts to the decodes of a batch. No clock, no I/O."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings) -> None:
        self._spec = spec
        self._capacity = spec.capacity
        self._settings = settings
        self._speculation = Speculation(settings.max_drafts)
        self.drafted = 0
        """Drafts that were computed."""
        self.accepted = 0
        """Drafts that were put out."""
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
        budget = self._settings.max_batch_tokens - sum(chunk.length for chunk in batch)
        if not sequences or budget <= 0:
            return
        limits = [self._limit(sequence) for sequence in sequences]
        proposed = self.propose(sequences, limits, budget)
        self._skipped = 0
        for at, drafts in zip(places, proposed, strict=True):
            if drafts:
                count = tables.cover_drafts(batch[at].sequence, len(drafts), running)
                batch[at] = batch[at]._replace(drafts=tuple(drafts[:count]))

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        """Drafts for each sequence: `limits` of each at most, `budget` in all."""
        guessers = []
        for sequence in sequences:
            if sequence.guesser is None:
                sequence.guesser = self._speculation.guesser(sequence.tokens, sequence.request.prediction)
            guessers.append(sequence.guesser)
        return self._speculation.choose(guessers, limits, budget, self._skipped)

    def may_rest(self, sequences: Seq[Sequence]) -> bool:
        """Whether the next step, one token of each of `sequences`, may be planned without asking for drafts. Then
        it is, or the question is asked once more."""
        if not self._settings.max_drafts:
            return True
        if self._gain >= _WORTH or self._skipped >= _RUN:
            return False
        return not any(sequence.request.prediction for sequence in sequences)

    def take(
        self, step: Step, results: Seq[SampledToken], seconds: float
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        """Moves all sequences of a step on. Returns the new tokens, already appended, of those that go on.

        `results` are aligned with the step's rows. `seconds` that it took; 0: nobody knows.
        """
        if all(chunk.length == 1 and chunk.samples for chunk in step.batch):
            self._speculation.cost.observe(sum(chunk.width for chunk in step.batch), seconds)
        for chunk in step.batch:
            if not chunk.samples:
                chunk.sequence.num_computed += chunk.length
        drawn, rest, before = [], iter(results), self.accepted
        for chunk in step.sampled:
            of_chunk = list(islice(rest, 1 + len(chunk.drafts)))
            if chunk.sequence.ending is Ending.NONE:
                drawn.append((chunk.sequence, self._accept(chunk, of_chunk)))
            else:
                chunk.sequence.num_computed += chunk.length
        if step.ahead:
            self._skipped += 1
        elif step.sampled:
            share = (self.accepted - before) / len(step.sampled)
            self._gain = _KEEP * self._gain + (1 - _KEEP) * share
        return drawn

    def _accept(self, chunk: Chunk, results: list[SampledToken]) -> list[SampledToken]:
        """Appends what a chunk has given: `results` are drawn after its last token and after each draft.
        The last one of the new tokens may end the sequence."""
        sequence, length, drafts = chunk
        if not drafts:  # nearly always: nothing to compare
            sequence.append(results[0].token)
            sequence.num_computed += length
            if sequence.guesser is not None:
                sequence.guesser.learn([results[0].token])
            return results
        new: list[SampledToken] = []
        for result, draft in zip(results, (*drafts, None), strict=True):
            sequence.append(result.token)
            new.append(result)
            if result.token != draft or self._ends(sequence):
                break
        sequence.num_computed += length + len(new) - 1
        self.drafted += len(drafts)
        self.accepted += len(new) - 1
        if sequence.guesser is not None:
            sequence.guesser.learn([result.token for result in new])
        return new

    def _limit(self, sequence: Sequence) -> int:
        """Drafts after which the sequence may still put out one more token."""
        if not sequence.speculates:
            return 0
        output = sequence.request.max_tokens - sequence.output_tokens
        room = min(self._spec.context_length, self._capacity) - len(sequence.tokens)
        return max(0, min(output, room, self._settings.max_drafts + 1) - 1)

    def _ends(self, sequence: Sequence) -> bool:
        too_long = len(sequence.tokens) > self._capacity
        return too_long or bool(sequence.finish_reason(self._spec.context_length))

"""What is wanted of prompts beside their next token, by the rows of a step: vectors, log probabilities. Vectors:

    prompt    [ p0 p1 p2 p3 | p4 p5 p6 p7 | p8 p9 ]     in chunks, as it comes
    mean        ^^^^^^^^^^^   ^^^^^^^^^^^   ^^^^^       every row, once
    last                                       ^
    cls         ^
    sums        s            + s'          + s''    divided by the number of rows, brought to length 1

A preempted prompt may be computed again from its beginning or from where the cache has it; rows that were counted
are not counted again. For `mean` and `cls` nothing is taken from other prompts' blocks, since rows that are not
computed would be missing: the chain of the prompt's blocks begins with a name of its own.

Log probabilities of the prompt's tokens:

    prompt    [ p0 p1 p2 p3 | p4 p5 p6 ]     in chunks, as it comes
    scored      ^  ^  ^  ^    ^  ^
    sampled                         ^        where there is to be output

A row is scored once, and nothing is taken from other prompts' blocks, for the same reasons.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from services.executor.core.engine import EngineSpec
from services.executor.core.prompt_results import Floats, PromptRows, PromptTokenScores
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.admission import FieldSize, RequestChecks
from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature
from services.executor.scheduler.sequence import Ending, Sequence
from services.executor.scheduler.state_slots import Rows
from shared import limits
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest, TokenEntry

# --- what is refused -----------------------------------------------------------------------------


def _numbers(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    if -1 <= request.prompt_logprobs <= spec.vocab_size:
        return None
    return InvalidRequest(f"prompt_logprobs is {request.prompt_logprobs} and must be between -1 and {spec.vocab_size}.")


def _sizes(request: GenerationRequest) -> list[FieldSize]:
    scores = len(request.prompt) * (request.prompt_logprobs + 1)
    return [
        ("logprob_token_ids", len(request.logprob_token_ids), limits.LOGPROB_TOKEN_IDS, None),
        ("prompt_logprobs", scores, limits.PROMPT_LOGPROBS, None),
    ]


def _check(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    """Whether the request asks for what the model does not do, or for two things at once."""
    if spec.generates and not request.pools:
        return None  # nearly always
    tasks = spec.tasks
    if request.embed and "embed" not in tasks:
        return InvalidRequest("This model makes no vectors; choose one whose pooling is mean, last or cls.")
    if request.classify and "classify" not in tasks:
        return InvalidRequest("This model has no classification head; choose one that has.")
    if not request.embed and not request.classify and "generate" not in tasks:
        return InvalidRequest(f"This model generates no text (it does {' and '.join(tasks)}); choose a language model.")
    if request.embed + request.classify + bool(request.logprob_token_ids) > 1:
        return InvalidRequest("embed, classify and logprob_token_ids exclude each other; send one.")
    if request.pools and request.prompt_logprobs >= 0:
        return InvalidRequest("prompt_logprobs cannot be combined with embed, classify or logprob_token_ids.")
    return None


# --- how much of it a step computes --------------------------------------------------------------

# Of the logits, in float32 and over all ranks, that a step computes to score prompts at most.
SCORED_LOGITS_BYTES = 256 << 20


class _LogitsBudget:
    """`StepBudget`: rows of logits beside those that are sampled, `rows` of them."""

    def __init__(self, rows: int) -> None:
        self._rows = self._left = rows

    def most(self, sequence: Sequence, length: int) -> int:
        if sequence.scoring:
            length = min(length, self._left)
        if length == sequence.remaining and not self._names(sequence):
            length -= 1  # the last row's logits may have to be computed by another step
        return length

    def _names(self, sequence: Sequence) -> bool:
        """Whether there is room for the logits of the tokens that it names behind its prompt."""
        if sequence.named is None or self._left == self._rows:
            return True
        return len(sequence.named.targets) <= self._left

    def charge(self, sequence: Sequence, length: int) -> None:
        if sequence.scoring:
            self._left -= length
        if sequence.named is not None and length == sequence.remaining:
            self._left = max(0, self._left - len(sequence.named.targets))


def _admitted(sequence: Sequence) -> None:
    sequence.budgeted = sequence.scores is not None or sequence.named is not None


# --- rows of steps -------------------------------------------------------------------------------


class PromptPart(NamedTuple):
    """Rows of a prompt, in one step, that something is wanted of."""

    sequence: Sequence
    first: int  # row of the flat batch
    start: int  # position of its token
    end: int


_VECTOR: Callable[[Sequence], PromptRows | None] = attrgetter("vector")
_SCORES: Callable[[Sequence], PromptRows | None] = attrgetter("scores")
_NAMED: Callable[[Sequence], PromptRows | None] = attrgetter("named")


def _fields(step: PlannedStep) -> dict[str, Any] | None:
    if step.ahead is not None or not [chunk for chunk in step.batch if chunk.sequence.tells_of_prompt]:
        return None  # nearly always
    pools, scored, named = (_parts(step.rows, wanted) for wanted in (_VECTOR, _SCORES, _NAMED))
    if not (pools or scored or named):
        return None
    step.handlers.append(partial(_take, pools, scored, named))
    fields: dict[str, Any] = _scored_fields(scored, named) if scored or named else {}
    if pools:
        fields["pools"] = to_bytes([(part.first, part.first + part.end - part.start) for part in pools])
    return fields


def _parts(rows: Rows, wanted: Callable[[Sequence], PromptRows | None]) -> list[PromptPart]:
    found, row = [], 0
    for sequence, start, length, drafts in rows:
        of = wanted(sequence)
        if of is not None and (own := of.rows(start, start + length)) is not None:
            found.append(PromptPart(sequence, row + own[0] - start, *own))
        row += length + drafts
    return found


def _take_sums(pools: Seq[PromptPart], sums: Floats) -> list[Sequence]:
    """Counts what a step has given: `sums` [len(pools), hidden]. Returns those whose vectors are whole."""
    whole = []
    for part, summed in zip(pools, sums, strict=True):
        sequence = part.sequence
        if sequence.ending is Ending.NONE and sequence.vector is not None:
            sequence.vector.add(summed, part.end)
            if sequence.vector.whole:
                whole.append(sequence)
    return whole


def _scored_fields(scored: Seq[PromptPart], named: Seq[PromptPart]) -> dict[str, Any]:
    rows: list[int] = []
    targets: list[int] = []
    for part in scored:
        rows += range(part.first, part.first + part.end - part.start)
        targets += part.sequence.tokens[part.start + 1 : part.end + 1]
    prompts = len(rows)
    for part in named:
        wanted = _targets_of(part.sequence)
        rows += [part.first] * len(wanted)
        targets += wanted
    tops = [part.sequence.scores.top for part in scored if part.sequence.scores is not None]
    return {
        "score_rows": to_bytes(rows),
        "score_targets": to_bytes(targets),
        "score_top": max(tops, default=0),
        "score_named": len(rows) - prompts,
    }


def _targets_of(sequence: Sequence) -> list[int]:
    return [] if sequence.named is None else sequence.named.targets


def _take_scores(scored: Seq[PromptPart], found: PromptTokenScores) -> list[Sequence]:
    """Counts what a step has given. Returns those whose prompts are scored and that have nothing else to give, or
    whose scores are no numbers."""
    over, at = [], 0
    for sequence, _, start, end in scored:
        count = end - start
        part, at = found.part(at, at + count), at + count
        if sequence.ending is not Ending.NONE or sequence.scores is None:
            continue
        sequence.scores.add(part, end)
        if not sequence.scores.finite or (sequence.scores.whole and not sequence.continues):
            over.append(sequence)
    return over


def _take_named(named: Seq[PromptPart], found: PromptTokenScores) -> list[Sequence]:
    """Counts what a step has given behind prompts: the last rows of `found`. Returns those that it has told of."""
    at = len(found.logprobs) - sum(len(_targets_of(part.sequence)) for part in named)
    whole = []
    for sequence, _, _, end in named:
        count = len(_targets_of(sequence))
        part, at = found.part(at, at + count), at + count
        if sequence.ending is Ending.NONE and sequence.named is not None:
            sequence.named.add(part, end)
            whole.append(sequence)
    return whole


def _take(
    pools: Seq[PromptPart],
    scored: Seq[PromptPart],
    named: Seq[PromptPart],
    pooled: Floats | None,
    scores: PromptTokenScores | None,
) -> list[tuple[Sequence, TokenEntry | None]]:
    """A `ResultHandler`: counts what a step has given of prompts that are summed up or scored."""
    told: list[tuple[Sequence, TokenEntry | None]] = []
    if pooled is not None:
        told += [(s, s.vector_entry()) for s in _take_sums(pools, pooled)]
    if scores is not None:
        told += [(s, s.scores_entry()) for s in _take_scores(scored, scores)]
        told += [(s, s.vector_entry()) for s in _take_named(named, scores)]
    return told


def _make(context: FeatureContext) -> StepFeature:
    rows = max(1, SCORED_LOGITS_BYTES // (4 * context.spec.vocab_size))
    return StepFeature(_fields, budget=partial(_LogitsBudget, rows), admitted=_admitted)


PROMPT_RESULTS = Feature(
    _make, RequestChecks(numbers=_numbers, sizes=_sizes, tokens=("logprob_token_ids",), check=_check)
)

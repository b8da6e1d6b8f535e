"""From the batch, `{sequence: number of tokens}`, to the step plan that the ranks execute.

What is wanted of prompts beside their next token, by the rows of a step. Vectors:

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

from array import array
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import msgspec

from services.executor.core.engine import DraftPlan
from services.executor.core.prompt_results import Floats, PromptRows, Scores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.adapter_slots import NO_SLOT
from services.executor.scheduler.sequence import Ending, Sequence
from shared.messages import GenerationRequest, TokenEntry


class ScheduledTokens(NamedTuple):
    """The next `length` tokens of a sequence, to be computed in one step, and drafts of those that follow."""

    sequence: Sequence
    length: int
    samples: bool
    """Whether the chunk has the sequence's last token, whose logits give the next one."""
    drafts: tuple[int, ...] = ()
    """None where the chunk does not end with the sequence's last token."""

    @property
    def width(self) -> int:
        """Rows of the flat batch."""
        return self.length + len(self.drafts)

    @property
    def end(self) -> int:
        """Tokens in the cache once the step has run, drafts included."""
        return self.sequence.num_computed + self.width


class PromptPart(NamedTuple):
    """Rows of a prompt, in one step, that something is wanted of."""

    sequence: Sequence
    first: int
    """Row of the flat batch."""
    start: int
    """Position of its token."""
    end: int


class SampledRow(NamedTuple):
    sequence: Sequence
    sampling: SamplingState
    """As if the drafts before the row were the sequence's tokens."""
    ahead: int = 0
    """Drafts before the row, the one that it computes included."""

    @property
    def request(self) -> GenerationRequest:
        return self.sequence.request


class Step(NamedTuple):
    batch: Seq[ScheduledTokens]
    sampled: Seq[ScheduledTokens]
    """Those that give tokens, in the order of their rows."""
    rows: Seq[SampledRow]
    pools: Seq[PromptPart] = ()
    """What it sums up."""
    ahead: bool = False
    """Whether it was planned before the tokens of the step before it were known (`overlap.py`)."""
    scored: Seq[PromptPart] = ()
    """What of its prompts it scores."""
    named: Seq[PromptPart] = ()
    """Behind which of its prompts it scores given tokens."""
    followed: bool = False
    """`StepPlan.followed`"""

    def failed(self, rows: Collection[int] | None) -> list[SampledRow]:
        """The rows with these indices, in order; None: one for each chunk."""
        if rows is None:
            return [SampledRow(chunk.sequence, chunk.sequence.sampling) for chunk in self.batch]
        return [self.rows[row] for row in sorted(rows)]


NO_STEP = Step((), (), ())
"""While none is under way."""


def build_plan(
    step: int, batch: list[ScheduledTokens], copies: Copies, block_size: int
) -> tuple[StepPlan, list[ScheduledTokens]]:
    """The plan, and the chunks that are sampled, in the order of the plan's `sample_rows`.

    Every block that a chunk writes to is in its sequence's table already. The batch may be empty where
    there are copies.
    """
    ordered = in_order(batch)
    tokens, positions, slots, ends = array("i"), array("i"), array("i"), array("i")
    tables: list[bytes] = []
    filled: list[tuple[Sequence, int, int]] = []
    decodes = 0
    for sequence, length, _, drafts in ordered:  # without a call of ours for a single token
        start = sequence.num_computed
        end = start + length + len(drafts)
        if end - start == 1:
            decodes += 1
            tokens.append(sequence.tokens[start])
            positions.append(start)
            slots.append(sequence.table[start // block_size] * block_size + start % block_size)
        else:
            tokens += sequence.tokens[start : start + length]
            tokens.extend(drafts)
            positions.extend(range(start, end))
            slots += _slots(sequence, start, end, block_size)
        ends.append(end)
        if sequence.cold:
            filled.append((sequence, start, end))
            tables.append(table_of(sequence, end, block_size).tobytes())
        else:
            tables.append(sequence.table[: (end - 1) // block_size + 1].tobytes())
    widths = [1] * decodes + [chunk.width for chunk in ordered[decodes:]]
    sampled = [chunk for chunk in ordered if chunk.samples]
    plan = StepPlan(
        step=step,
        num_decodes=decodes,
        token_ids=tokens.tobytes(),
        positions=positions.tobytes(),
        slots=slots.tobytes(),
        query_lens=array("i", widths).tobytes(),
        context_lens=ends.tobytes(),
        block_tables=b"".join(tables),
        sample_rows=array("i", _sample_rows(ordered, decodes)).tobytes(),
        saves=to_bytes(copies.saves),
        compressions=compressions_of(filled, block_size) if filled else b"",
        restores=to_bytes(copies.restores),
        save_keys=copies.keys,
    )
    return plan, sampled


def table_of(sequence: Sequence, end: int, block_size: int) -> "array[int]":
    """The blocks that the first `end` tokens are read from, by whoever computes the last of them: its own as it is
    written, those before it as they are kept, be it that this step fills them."""
    last, sealed = (end - 1) // block_size, sequence.num_sealed
    if not sequence.cold:
        return sequence.table[: last + 1]
    return sequence.table[:sealed] + sequence.cold[: last - sealed] + sequence.table[last : last + 1]


def compressions_of(chunks: Iterable[tuple[Sequence, int, int]], block_size: int) -> bytes:
    """`StepPlan.compressions` of a step that computes the positions [start, end) of each of these sequences, which have
    cold ids."""
    pairs: list[tuple[int, int]] = []
    for sequence, start, end in chunks:
        blocks = range(start // block_size, end // block_size)
        pairs += [(sequence.table[at], sequence.cold[at - sequence.num_sealed]) for at in blocks]
    return to_bytes(pairs)


def in_order(batch: Seq[ScheduledTokens]) -> list[ScheduledTokens]:
    """`batch` in the order of the flat batch: single tokens first."""
    singles = [chunk for chunk in batch if chunk.length == 1 and not chunk.drafts]
    if len(singles) == len(batch):  # nearly always
        return singles
    return singles + [chunk for chunk in batch if chunk.length > 1 or chunk.drafts]


def rows_in(batch: Seq[ScheduledTokens]) -> list[tuple[Sequence, int, int, int]]:
    """(sequence, position of its first token, tokens, drafts behind them) in the order of the flat batch."""
    return [(c.sequence, c.sequence.num_computed, c.length, len(c.drafts)) for c in in_order(batch)]


def rows_of(sampled: list[ScheduledTokens], known: dict[Sequence, SampledRow]) -> list[SampledRow]:
    """The rows of the chunks that are sampled: after each one's last token, and after each of its drafts. `known`:
    of sequences, those after the last token, which are the same in every step; those that lack are added."""
    rows = []
    for sequence, _, _, drafts in sampled:
        row = known.get(sequence)
        if row is None:
            row = known[sequence] = SampledRow(sequence, sequence.sampling)
        rows.append(row)
        if drafts:
            states = sequence.sampling.after_each(drafts)
            rows += [SampledRow(sequence, state, n) for n, state in enumerate(states, 1)]
    return rows


def prompt_tokens(plan: StepPlan, rows: list[SampledRow]) -> int:
    """Tokens of a plan that are neither decodes nor drafts."""
    drafting = sum(1 + (row.ahead == 1) for row in rows if row.ahead)  # a chunk's own row counts once
    return len(plan.token_ids) // 4 - plan.num_decodes - drafting


def _sample_rows(ordered: list[ScheduledTokens], decodes: int) -> list[int]:
    """Rows of the flat batch: of each chunk that is sampled, its last token's and those of its drafts. The first
    `decodes` chunks have one row each."""
    rows = [row for row, chunk in enumerate(ordered[:decodes]) if chunk.samples]
    end = decodes
    for _, length, samples, drafts in ordered[decodes:]:
        end += length + len(drafts)
        if samples:
            rows += range(end - 1 - len(drafts), end)
    return rows


def _slots(sequence: Sequence, start: int, end: int, block_size: int) -> "array[int]":
    """Slots of the tokens at the positions [start, end): block id * block size + offset."""
    slots: array[int] = array("i")
    for at in range(start // block_size, (end - 1) // block_size + 1):
        first = sequence.table[at] * block_size - at * block_size
        slots.extend(range(first + max(start, at * block_size), first + min(end, (at + 1) * block_size)))
    return slots


def in_draft_order(members: Seq[Sequence]) -> list[Sequence]:
    """Those of a round of the draft model in the order of its first pass: single tokens first."""
    return sorted(members, key=lambda sequence: len(sequence.tokens) - sequence.followed > 1)


def build_draft_plan(
    step: int, members: Seq[Sequence], count: int, copies: Copies, block_size: int
) -> tuple[DraftPlan, list[SampledRow]]:
    """The plan of `count` proposals for each of `members`, whose tables cover these, and the rows that are sampled.

    Blocks that are not full are read as they are written: none of them is compressed before the step.
    """
    ordered = in_draft_order(members)
    ends = [len(sequence.tokens) for sequence in ordered]
    widths = [end - sequence.followed for sequence, end in zip(ordered, ends, strict=True)]
    tables = [
        s.table[: -(-(end + count) // block_size)].tobytes() for s, end in zip(ordered, ends, strict=True)
    ]
    parts = [(s, s.followed, end) for s, end in zip(ordered, ends, strict=True)]
    plan = StepPlan(
        step=step,
        num_decodes=widths.count(1),
        token_ids=b"".join([s.tokens[start:].tobytes() for s, start, _ in parts]),
        positions=b"".join([array("i", range(start, end)).tobytes() for _, start, end in parts]),
        slots=b"".join([_slots(*part, block_size).tobytes() for part in parts]),
        query_lens=to_bytes(widths),
        context_lens=to_bytes([end + count for end in ends]),
        block_tables=b"".join(tables),
        sample_rows=array("i", [end - 1 for end in accumulate(widths)]).tobytes(),
        saves=to_bytes(copies.saves),
        of_draft=True,
        save_keys=copies.keys,
    )
    behind = [_slots(s, end, end + count - 1, block_size).tobytes() for s, _, end in parts]
    return DraftPlan(plan, count, b"".join(behind)), [SampledRow(s, s.sampling) for s in ordered]


_VECTOR: Callable[[Sequence], PromptRows | None] = attrgetter("vector")
_SCORES: Callable[[Sequence], PromptRows | None] = attrgetter("scores")
_NAMED: Callable[[Sequence], PromptRows | None] = attrgetter("named")


def parts_of(batch: Seq[ScheduledTokens]) -> tuple[list[PromptPart], list[PromptPart], list[PromptPart]]:
    """What of its prompts a step sums up, what it scores, and behind what it scores given tokens."""
    if not [chunk for chunk in batch if chunk.sequence.tells_of_prompt]:  # nearly always
        return [], [], []
    return _parts(batch, _VECTOR), _parts(batch, _SCORES), _parts(batch, _NAMED)


def _parts(batch: Seq[ScheduledTokens], wanted: Callable[[Sequence], PromptRows | None]) -> list[PromptPart]:
    found, row = [], 0
    for chunk in in_order(batch):
        of, start = wanted(chunk.sequence), chunk.sequence.num_computed
        if of is not None and (rows := of.rows(start, start + chunk.length)) is not None:
            found.append(PromptPart(chunk.sequence, row + rows[0] - start, *rows))
        row += chunk.width
    return found


def take_sums(pools: Seq[PromptPart], sums: Floats) -> list[Sequence]:
    """Counts what a step has given: `sums` [len(pools), hidden]. Returns those whose vectors are whole."""
    whole = []
    for part, summed in zip(pools, sums, strict=True):
        sequence = part.sequence
        if sequence.ending is Ending.NONE and sequence.vector is not None:
            sequence.vector.add(summed, part.end)
            if sequence.vector.whole:
                whole.append(sequence)
    return whole


def with_parts(
    plan: StepPlan, pools: Seq[PromptPart], scored: Seq[PromptPart], named: Seq[PromptPart]
) -> StepPlan:
    """`plan`, told what is wanted of its prompts."""
    if pools:
        sums = [(part.first, part.first + part.end - part.start) for part in pools]
        plan = msgspec.structs.replace(plan, pools=to_bytes(sums))
    return _with_scored(plan, scored, named) if scored or named else plan


def _with_scored(plan: StepPlan, scored: Seq[PromptPart], named: Seq[PromptPart]) -> StepPlan:
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
    return msgspec.structs.replace(
        plan,
        score_rows=to_bytes(rows),
        score_targets=to_bytes(targets),
        score_top=max(tops, default=0),
        score_named=len(rows) - prompts,
    )


def _targets_of(sequence: Sequence) -> list[int]:
    return [] if sequence.named is None else sequence.named.targets


def with_segments(plan: StepPlan, batch: Seq[ScheduledTokens]) -> StepPlan:
    """`plan` of `batch`, told where the second segments of its sequences begin."""
    begins = [chunk.sequence.request.second_segment for chunk in in_order(batch)]
    return msgspec.structs.replace(plan, second_segments=to_bytes(begins)) if any(begins) else plan


def with_adapters(plan: StepPlan, sequences: Iterable[Sequence], loads: list[tuple[int, str]]) -> StepPlan:
    """`plan`, of these sequences in this order, with the slots of their adapters, and the directories that are read
    into slots first."""
    slots = [sequence.adapter_slot for sequence in sequences]
    if not loads and max(slots, default=NO_SLOT) == NO_SLOT:
        return plan
    return msgspec.structs.replace(plan, adapters=to_bytes(slots), adapter_loads=loads)


def with_choices(plan: StepPlan, sequences: Iterable[Sequence]) -> StepPlan:
    """`plan`, told what the tokens of its sequences, in their order, read."""
    choices = [sequence.choice for sequence in sequences]
    return msgspec.structs.replace(plan, sparse=to_bytes([number for choice in choices for number in choice]))


def take_scores(scored: Seq[PromptPart], found: Scores) -> list[Sequence]:
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


def take_named(named: Seq[PromptPart], found: Scores) -> list[Sequence]:
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


def take_parts(
    step: Step, pooled: Floats | None, scores: Scores | None
) -> list[tuple[Sequence, TokenEntry | None]]:
    """Counts what a step has given of prompts that are summed up or scored: those that are over, with what they end
    with."""
    told: list[tuple[Sequence, TokenEntry | None]] = []
    if pooled is not None:
        told += [(s, s.vector_entry()) for s in take_sums(step.pools, pooled)]
    if scores is not None:
        told += [(s, s.scores_entry()) for s in take_scores(step.scored, scores)]
        told += [(s, s.vector_entry()) for s in take_named(step.named, scores)]
    return told

"""From the batch, `{sequence: number of tokens}`, to the step plan that the ranks execute."""

from array import array
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

from services.executor.core.engine import DraftPlan
from services.executor.core.prompt_results import Floats, PromptTokenScores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.sequence import Sequence
from shared.messages import GenerationRequest, TokenEntry


class ScheduledTokens(NamedTuple):
    """The next `length` tokens of a sequence, to be computed in one step, and drafts of those that follow."""

    sequence: Sequence
    length: int
    samples: bool  # whether the chunk has the sequence's last token, whose logits give the next one
    drafts: tuple[int, ...] = ()  # None where the chunk does not end with the sequence's last token

    @property
    def width(self) -> int:
        """Rows of the flat batch."""
        return self.length + len(self.drafts)

    @property
    def end(self) -> int:
        """Tokens in the cache once the step has run, drafts included."""
        return self.sequence.num_computed + self.width


class SampledRow(NamedTuple):
    sequence: Sequence
    sampling: SamplingState  # as if the drafts before the row were the sequence's tokens
    ahead: int = 0  # drafts before the row, the one that it computes included

    @property
    def request(self) -> GenerationRequest:
        return self.sequence.request


# Takes what the engine has summed up and scored in a step; returns the sequences that are over, with what they end
# with.
ResultHandler = Callable[[Floats | None, PromptTokenScores | None], list[tuple[Sequence, TokenEntry | None]]]


class Step(NamedTuple):
    batch: Seq[ScheduledTokens]
    sampled: Seq[ScheduledTokens]  # those that give tokens, in the order of their rows
    rows: Seq[SampledRow]
    handlers: Seq[ResultHandler] = ()  # who takes what it gives beside tokens
    # Whether it was planned before the tokens of the step before it were known (`planning/overlap.py`).
    ahead: bool = False
    followed: bool = False  # `StepPlan.followed`

    def failed(self, rows: Collection[int] | None) -> list[SampledRow]:
        """The rows with these indices, in order; None: one for each chunk."""
        if rows is None:
            return [SampledRow(chunk.sequence, chunk.sequence.sampling) for chunk in self.batch]
        return [self.rows[row] for row in sorted(rows)]


NO_STEP = Step((), (), ())  # while none is under way


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
        if sequence.quantized:
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
    if not sequence.quantized:
        return sequence.table[: last + 1]
    return sequence.table[:sealed] + sequence.quantized[: last - sealed] + sequence.table[last : last + 1]


def compressions_of(chunks: Iterable[tuple[Sequence, int, int]], block_size: int) -> bytes:
    """`StepPlan.compressions` of a step that computes the positions [start, end) of each of these sequences, which have
    quantized ids."""
    pairs: list[tuple[int, int]] = []
    for sequence, start, end in chunks:
        blocks = range(start // block_size, end // block_size)
        pairs += [(sequence.table[at], sequence.quantized[at - sequence.num_sealed]) for at in blocks]
    return to_bytes(pairs)


def in_order(batch: Seq[ScheduledTokens]) -> list[ScheduledTokens]:
    """`batch` in the order of the flat batch: single tokens first."""
    singles = [chunk for chunk in batch if chunk.length == 1 and not chunk.drafts]
    if len(singles) == len(batch):  # nearly always
        return singles
    return singles + [chunk for chunk in batch if chunk.length > 1 or chunk.drafts]


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
    tables = [s.table[: -(-(end + count) // block_size)].tobytes() for s, end in zip(ordered, ends, strict=True)]
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

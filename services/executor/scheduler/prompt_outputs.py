"""What is wanted of prompts beside their next token: which rows of a step count, and what they give.

Vectors:

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

from collections.abc import Sequence as Seq

import msgspec
import numpy as np

from services.executor.core.prompt_results import Floats, Scores
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.scheduler.sequence import Ending, Sequence
from services.executor.scheduler.steps import Chunk, Pool, ScoredRows, in_order


def pools_of(batch: Seq[Chunk]) -> list[Pool]:
    """What a step counts."""
    if all(chunk.sequence.vector is None for chunk in batch):  # nearly always
        return []
    found, row = [], 0
    for chunk in in_order(batch):
        if chunk.sequence.vector is not None:
            pool = Pool(chunk, row)
            if pool.positions is not None:
                found.append(pool)
        row += chunk.width
    return found


def take_sums(pools: Seq[Pool], sums: Floats) -> list[Sequence]:
    """Counts what a step has given: `sums` [len(pools), hidden]. Returns those whose vectors are whole."""
    whole = []
    for pool, part in zip(pools, sums, strict=True):
        sequence, positions = pool.sequence, pool.positions
        if sequence.ending is Ending.NONE and sequence.vector is not None and positions is not None:
            sequence.vector.add(part, positions[1])
            if sequence.vector.whole:
                whole.append(sequence)
    return whole


def rows_of_pools(pools: Seq[Pool]) -> bytes:
    """`StepPlan.pools`."""
    return to_bytes([pool.rows for pool in pools])


def scored_in(batch: Seq[Chunk]) -> list[ScoredRows]:
    """What a step scores."""
    if not [chunk for chunk in batch if chunk.sequence.scores is not None]:  # nearly always
        return []
    found, row = [], 0
    for chunk in in_order(batch):
        sequence = chunk.sequence
        start = sequence.num_computed
        rows = None if sequence.scores is None else sequence.scores.rows(start, start + chunk.length)
        if rows is not None:
            found.append(ScoredRows(sequence, row + rows[0] - start, *rows))
        row += chunk.width
    return found


def with_scored(plan: StepPlan, scored: Seq[ScoredRows]) -> StepPlan:
    """`plan`, which scores them."""
    rows = np.concatenate([np.arange(part.end - part.start) + part.first for part in scored])
    targets = np.concatenate([part.sequence.tokens[part.start + 1 : part.end + 1] for part in scored])
    tops = [part.sequence.scores.top for part in scored if part.sequence.scores is not None]
    return msgspec.structs.replace(
        plan, score_rows=to_bytes(rows), score_targets=to_bytes(targets), score_top=max(tops)
    )


def take_scores(scored: Seq[ScoredRows], found: Scores) -> list[Sequence]:
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

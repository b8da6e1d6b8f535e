"""Prompts that are wanted as vectors: which rows of a step count, and what they add up to.

    prompt    [ p0 p1 p2 p3 | p4 p5 p6 p7 | p8 p9 ]     in chunks, as it comes
    mean        ^^^^^^^^^^^   ^^^^^^^^^^^   ^^^^^       every row, once
    last                                       ^
    cls         ^
    sums        s            + s'          + s''    divided by the number of rows, brought to length 1

A preempted prompt may be computed again from its beginning or from where the cache has it; rows that were counted
are not counted again. For `mean` and `cls` nothing is taken from other prompts' blocks, since rows that are not
computed would be missing: the chain of the prompt's blocks begins with a name of its own.
"""

from collections.abc import Sequence as Seq

from services.executor.core.prompt_results import Floats
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.sequence import Ending, Sequence
from services.executor.scheduler.steps import Chunk, Pool, in_order


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


def take(pools: Seq[Pool], sums: Floats) -> list[Sequence]:
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

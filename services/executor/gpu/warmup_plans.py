"""Steps that a rank computes before it is ready, so that no request waits for a kernel to be compiled. Pure.

What Triton compiles depends on a step by these alone:

    attention     rows of a tile (16, 32 .. 128), and whether keys are split
    merging       parts that keys are split in (2, 4 .. 64)
    products      tokens of the step, in powers of two up to 128

Each of them comes up in one of the steps here, and so does compressing a block. The longest is as long as a step may
be, so that memory that does not suffice is told before the ring is ready. All read block 0 again and again, and write
nothing but the first cold block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.gpu.kernels.matmul_launch import MOST_ROWS
from services.executor.gpu.kernels.tiles import LEAST_KEYS, MOST_SPLITS, PREFILL_ROWS, rows_for


class Chunk(NamedTuple):
    """Of one sequence."""

    tokens: int
    context: int
    """Tokens behind it, its own included."""


def chunks(most_tokens: int, context_length: int, group: int) -> list[Chunk]:
    """One for each way of computing a step of up to `most_tokens`, of sequences of up to `context_length`, with `group`
    query heads per KV head; the longest first, whose memory the others find free."""
    most = min(most_tokens, context_length)
    least = rows_for(group, 1)
    tiles = [max(1, min(rows // group, most)) for rows in _powers(least, max(least, PREFILL_ROWS))]
    products = [min(tokens, most) for tokens in (1, *_powers(16, MOST_ROWS), most)]
    split = [parts // 2 * LEAST_KEYS + 1 for parts in _powers(2, MOST_SPLITS)]
    split = [context for context in split if context <= context_length]
    found = {Chunk(tokens, tokens) for tokens in (*tiles, *products)}
    found |= {Chunk(tokens, context) for context in split[:1] for tokens in tiles if tokens <= context}
    found |= {Chunk(1, context) for context in split}
    return sorted(found, reverse=True)


def plans(found: Sequence[Chunk], block_size: int, compression: tuple[int, int] | None) -> list[StepPlan]:
    """A step of each of `found` alone; the first one compresses the blocks (hot id, cold id), where there are some."""
    made = [_plan_of(chunk, block_size) for chunk in found]
    if compression is not None:
        made[0] = structs.replace(made[0], compressions=to_bytes([compression]))
    return made


def _plan_of(chunk: Chunk, block_size: int) -> StepPlan:
    tokens, context = chunk
    return StepPlan(
        step=0,
        num_decodes=int(tokens == 1),
        token_ids=to_bytes([0] * tokens),
        positions=to_bytes(np.arange(context - tokens, context, dtype=np.int32)),
        slots=to_bytes([-1] * tokens),
        query_lens=to_bytes([tokens]),
        context_lens=to_bytes([context]),
        block_tables=to_bytes([0] * -(-context // block_size)),
        sample_rows=to_bytes([tokens - 1]),
    )


def _powers(first: int, last: int) -> list[int]:
    """`first` and its doubles up to `last`."""
    return [first << times for times in range((last // first).bit_length())]

"""From the batch, `{sequence: number of tokens}`, to the step plan that the ranks execute."""

from array import array
from typing import NamedTuple

import numpy as np

from services.executor.engine.plan import Int32Array, StepPlan, to_bytes
from services.executor.engine.sequence import Sequence
from services.executor.kv_cache.block_copies import Copies


class Chunk(NamedTuple):
    """The next `length` tokens of a sequence, to be computed in one step."""

    sequence: Sequence
    length: int

    @property
    def end(self) -> int:
        """Tokens in the cache once the step has run."""
        return self.sequence.num_computed + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the sequence's last token, whose logits give the next one."""
        return self.length == self.sequence.remaining


def build_plan(
    step: int, batch: list[Chunk], copies: Copies, block_size: int
) -> tuple[StepPlan, list[Sequence]]:
    """The plan, and the sequences that get a token, in the order of the plan's `sample_rows`.

    Every block that a chunk writes to is in its sequence's table already. The batch may be empty where
    there are copies.
    """
    singles = [chunk for chunk in batch if chunk.length == 1]
    longer = [chunk for chunk in batch if chunk.length > 1]
    ordered = singles + longer
    tokens = [_ints([c.sequence.tokens[c.sequence.num_computed] for c in singles])]
    positions = [_ints([c.sequence.num_computed for c in singles])]
    slots = [_ints([_slot(c.sequence, block_size) for c in singles])]
    for chunk in longer:
        start = chunk.sequence.num_computed
        tokens.append(_ints(chunk.sequence.tokens[start : chunk.end]))
        positions.append(np.arange(start, chunk.end, dtype=np.int32))
        slots.append(_slots(chunk, block_size))
    query_lens = [chunk.length for chunk in ordered]
    last_rows = np.cumsum(query_lens) - 1
    tables = b"".join(c.sequence.table[: -(-c.end // block_size)].tobytes() for c in ordered)
    plan = StepPlan(
        step=step,
        num_decodes=len(singles),
        token_ids=to_bytes(np.concatenate(tokens)),
        positions=to_bytes(np.concatenate(positions)),
        slots=to_bytes(np.concatenate(slots)),
        query_lens=to_bytes(query_lens),
        context_lens=to_bytes([chunk.end for chunk in ordered]),
        block_tables=to_bytes(np.frombuffer(tables, np.int32)),
        sample_rows=to_bytes(last_rows[[chunk.samples for chunk in ordered]]),
        saves=to_bytes(copies.saves),
        compressions=to_bytes(copies.compressions),
        restores=to_bytes(copies.restores),
    )
    return plan, [chunk.sequence for chunk in ordered if chunk.samples]


def _ints(values: "list[int] | array[int]") -> Int32Array:
    return np.array(values, dtype=np.int32)


def _slot(sequence: Sequence, block_size: int) -> int:
    block, offset = divmod(sequence.num_computed, block_size)
    return sequence.table[block] * block_size + offset


def _slots(chunk: Chunk, block_size: int) -> Int32Array:
    """Slots of a chunk's tokens: block id * block size + offset."""
    start = chunk.sequence.num_computed
    positions = np.arange(start, chunk.end, dtype=np.int32)
    first = start // block_size
    blocks = _ints(chunk.sequence.table[first : -(-chunk.end // block_size)])
    return blocks[positions // block_size - first] * np.int32(block_size) + positions % block_size

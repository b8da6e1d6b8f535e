"""Sparse attention on a GPU: which rows of a step read some blocks only (`core/sparse_attention.py` decides), and how
they are laid out for the kernels.

    step    [ row | row | row | row | row | row ]
    dense     row   row   row                      runs of rows that read everything: like sequences of a step, in tiles
    sparse                      row   row   row    each a sequence of its own, of the blocks that it reads, with a table
                                                   for each KV head, chosen anew by each layer (`kernels/pages.py`)

A row that reads some blocks is always computed in a tile of its own. Rows are taken in rounds, whose scores and tables
find room in `ROUND_NUMBERS`. A layer below a request's dense ones reads everything.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.sparse_attention import FIELDS, BlockReads, SparsePattern
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.gpu.inputs import Round, Shape, Split, inputs_of, to_device
from services.executor.gpu.kernels.attention_launch import Batch
from services.executor.gpu.kernels.pages import ChosenRows
from services.executor.gpu.kernels.tiles import rows_for, splits_of
from services.executor.platforms.base import sent

# Scores and entries of tables, of 4 bytes, that the rows of one round have: memory is bounded whatever a step has.
ROUND_NUMBERS = 8 << 20


class SparseRow(NamedTuple):
    """A row of a step that reads some of the blocks before its own only."""

    row: int
    sequence: int
    position: int
    reading: BlockReads
    dense_layers: int


def sparse_rows(plan: StepPlan, block_size: int) -> list[SparseRow]:
    """Those of `plan`, in their order."""
    choices = [SparsePattern(*numbers) for numbers in as_int32(plan.sparse).reshape(-1, FIELDS).tolist()]
    positions, ends = as_int32(plan.positions), np.cumsum(as_int32(plan.query_lens)).tolist()
    found = []
    for sequence, (choice, first, end) in enumerate(zip(choices, [0, *ends], ends, strict=False)):
        for row in range(first, end) if choice.kind else ():
            position = int(positions[row])
            if (reading := choice.reading(position, block_size)) is not None:
                found.append(SparseRow(row, sequence, position, reading, choice.dense_layers))
    return found


class SparseStep:
    """A step of which some rows read some blocks only."""

    def __init__(self, plan: StepPlan, rows: Sequence[SparseRow], shape: Shape, device: torch.device) -> None:
        """`rows`: those rows."""
        self._plan, self._rows, self._shape, self._device = plan, rows, shape, device
        self._splits: dict[int, Split | None] = {}

    def split(self, layer: int) -> Split | None:
        """How `layer` attends; None: every row reads everything there. Alike for all layers from the same ones on."""
        reached = max((row.dense_layers for row in self._rows if row.dense_layers <= layer), default=-1)
        if reached not in self._splits:
            rows = [row for row in self._rows if row.dense_layers <= reached]
            self._splits[reached] = self._split(rows) if rows else None
        return self._splits[reached]

    def _split(self, rows: Sequence[SparseRow]) -> Split:
        every = len(self._plan.slots) // 4
        others = np.setdiff1d(np.arange(every), [row.row for row in rows])
        most = max(row.reading.recent - row.reading.first if row.reading.top else 0 for row in rows)
        length = max(blocks_read(row, self._shape.block_size) for row in rows)
        count = max(1, ROUND_NUMBERS // (self._shape.kv_heads * (most + length)))
        parts = [rows[first : first + count] for first in range(0, len(rows), count)]
        rounds = [self._round(part, most, length, whole=len(part) == every) for part in parts]
        return Split(self._dense(others) if len(others) else None, rounds)

    def _dense(self, rows: NDArray[np.int64]) -> tuple[Tensor, Sequence[Batch]]:
        plan = plan_of_runs(self._plan, rows.tolist(), self._shape.block_size)
        return sent(rows, self._device), inputs_of(plan, self._shape, self._device).batches

    def _round(self, rows: Sequence[SparseRow], most: int, length: int, *, whole: bool) -> Round:
        shape, count = self._shape, len(rows)
        size, stride = shape.block_size, shape.kv_heads * length
        blocks = -(-as_int32(self._plan.context_lens).astype(np.int64) // size)
        starts = np.cumsum(blocks) - blocks
        choices = [
            (row.row, starts[row.sequence], *row.reading, row.position // size) for row in rows
        ]  # as `pages.FIELDS` says
        contexts = [(blocks_read(row, size) - 1) * size + row.position % size + 1 for row in rows]
        own = np.array([row.row for row in rows])
        everyone = np.arange(count + 1)
        arrays = (
            as_int32(self._plan.block_tables), np.array(choices).ravel(), as_int32(self._plan.slots)[own],
            everyone[:-1] * stride, everyone, np.array(contexts), np.zeros(count, np.int32), own,
        )  # fmt: skip
        tables, numbers, slots, table_starts, ids, lengths, zeros, places = to_device(arrays, self._device)
        batch = Batch(
            slots=slots,
            tables=tables,
            table_starts=table_starts,
            query_starts=ids,
            context_lens=lengths,
            tile_sequence=ids[:-1],
            tile_first=zeros,
            rows_per_tile=rows_for(shape.group, 1),
            splits=splits_of(count * shape.kv_heads, length * size, shape.processors),
            first_row=0,
            num_rows=count,
            tile_tokens=1,
            head_stride=length,
        )
        chosen = ChosenRows(tables, numbers.view(count, -1), most, length)
        return Round(None if whole else places.long(), chosen, batch)


def blocks_read(row: SparseRow, block_size: int) -> int:
    """Its own included."""
    first, recent, top = row.reading
    return first + top + row.position // block_size + 1 - recent


def plan_of_runs(plan: StepPlan, rows: Sequence[int], block_size: int) -> StepPlan:
    """`plan` of some of its rows, ascending, as attention sees it: those of a sequence that follow each other are a
    sequence of their own, whose earlier tokens were computed before."""
    lens, contexts = as_int32(plan.query_lens).tolist(), as_int32(plan.context_lens).tolist()
    tables, slots = as_int32(plan.block_tables), as_int32(plan.slots)
    blocks = [-(-context // block_size) for context in contexts]
    sequence_of = np.repeat(np.arange(len(lens)), lens)
    ends, starts = np.cumsum(lens), np.cumsum(blocks) - blocks
    query, context, table, decodes = [], [], [], 0
    for sequence, first, count in _runs(rows, sequence_of.tolist()):
        length = contexts[sequence] - int(ends[sequence]) + first + count
        query.append(count)
        context.append(length)
        begin = starts[sequence]
        table.append(tables[begin : begin - (-length // block_size)])
        decodes += sequence < plan.num_decodes
    return structs.replace(
        plan,
        token_ids=b"",
        positions=b"",
        sample_rows=b"",
        num_decodes=decodes,
        slots=to_bytes(slots[rows]),
        query_lens=to_bytes(query),
        context_lens=to_bytes(context),
        block_tables=to_bytes(np.concatenate(table)),
    )


def _runs(rows: Sequence[int], sequence_of: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(sequence, first row, number of rows) of the rows that follow each other in one sequence."""
    for (sequence, _), members in groupby(enumerate(rows), key=lambda one: (sequence_of[one[1]], one[1] - one[0])):
        run = [row for _, row in members]
        yield sequence, run[0], len(run)

"""A step plan as tensors on a device: all that the kernels of a step read of it.

A decoder's `compute` reads nothing else, so that a CUDA graph of it can be captured over tensors that stay where
they are, and be replayed once the next plan's numbers lie in them.

    plan ─▶ StepArrays (NumPy, pure) ─▶ one copy ─▶ tensors ─▶ StepInputs
                    └─▶ padded to a graph's size (graphs.py)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.gpu.kernels.attention_launch import Batch, rows_for
from services.executor.gpu.kernels.tiles import Tiles, splits_of, tiles_of
from services.executor.gpu.staging import Ints, to_device


class StepInputs(NamedTuple):
    """T tokens of S sequences, R of whose rows are sampled; all tensors int32, on one device."""

    token_ids: Tensor
    """[T]; -1 - k stands for the token that row k of the step before has sampled."""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T]; -1: a row that only fills up a graph's batch, whose key and value go nowhere"""
    sample_rows: Tensor
    """[R]"""
    batches: Sequence[Batch]
    """What attention needs: the decodes, then the prefill chunks; none of the two is empty."""
    compressions: Tensor | None = None
    """int64 [C, 2] (hot block, place among the cold ones): what the step fills, compressed in each layer between its
    writes and its attention. None: nothing, or behind the step, as decodes alone allow."""

    def of(self, kv_heads: int, group: int) -> Sequence[Batch]:
        """`batches`, which were made for these heads."""
        return self.batches


class Part(NamedTuple):
    """The decodes of a step, or its prefill chunks."""

    tiles: Tiles
    """Their sequences are counted over the whole step."""
    rows_per_tile: int
    tile_tokens: int
    longest: int
    """Of their contexts."""
    first_row: int
    num_rows: int


class StepArrays(NamedTuple):
    """What `StepInputs` has, on the host."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    sample_rows: Ints
    table_starts: Ints
    """[S]"""
    query_starts: Ints
    """[S + 1]"""
    context_lens: Ints
    """[S]"""
    tables: Ints
    """The sequences' blocks, end to end."""
    parts: list[Part]

    def flat(self) -> list[Ints]:
        """In the order of their places; the tables, whose length no graph knows beforehand, are the last."""
        tiles = [array for part in self.parts for array in part.tiles]
        return [*self[:7], *tiles, self.tables]


def arrays_of(plan: StepPlan, block_size: int, group: int, *, alone: bool = False) -> StepArrays:
    """`plan`, which computes some tokens, for layers with `group` query heads per KV head; `alone`: each token in a
    tile of its own, as a decode's, so that what it comes to does not depend on its neighbours."""
    query_lens = as_int32(plan.query_lens).astype(np.int64)
    context_lens = as_int32(plan.context_lens)
    blocks = -(-context_lens.astype(np.int64) // block_size)
    bounds = ((0, plan.num_decodes), (plan.num_decodes, len(query_lens)))
    return StepArrays(
        as_int32(plan.token_ids),
        as_int32(plan.positions),
        as_int32(plan.slots),
        as_int32(plan.sample_rows),
        np.cumsum(blocks) - blocks,
        np.concatenate(([0], np.cumsum(query_lens))),
        context_lens,
        as_int32(plan.block_tables),
        [_part(query_lens, context_lens, first, end, group, alone) for first, end in bounds if end > first],
    )


def _part(
    query_lens: NDArray[np.int64], context_lens: Ints, first: int, end: int, group: int, alone: bool
) -> Part:
    most = 1 if alone else int(query_lens[first:end].max())
    rows = rows_for(group, most)
    tokens = 1 if most == 1 else rows // group
    tiles = tiles_of(query_lens[first:end], tokens)
    return Part(
        Tiles(tiles.sequence + np.int32(first), tiles.first),
        rows,
        tokens,
        int(context_lens[first:end].max()),
        int(query_lens[:first].sum()),
        int(query_lens[first:end].sum()),
    )


def as_inputs(step: StepArrays, tensors: Sequence[Tensor], splits: Sequence[int]) -> StepInputs:
    """`tensors` hold what `step.flat()` has; `splits`: parts of the keys, for each of its parts."""
    token_ids, positions, slots, sample_rows, starts, ends, lens, *tiles, tables = tensors
    batches = [
        Batch(
            slots=slots,
            tables=tables,
            table_starts=starts,
            query_starts=ends,
            context_lens=lens,
            tile_sequence=tiles[2 * index],
            tile_first=tiles[2 * index + 1],
            rows_per_tile=part.rows_per_tile,
            tile_tokens=part.tile_tokens,
            splits=splits[index],
            first_row=part.first_row,
            num_rows=part.num_rows,
        )
        for index, part in enumerate(step.parts)
    ]
    return StepInputs(token_ids, positions, slots, sample_rows, batches)


def splits_for(step: StepArrays, kv_heads: int, processors: int) -> list[int]:
    """Parts of the keys that suit the contexts of `step`, for each of its parts."""
    return [splits_of(len(part.tiles.sequence) * kv_heads, part.longest, processors) for part in step.parts]


def inputs_of(
    plan: StepPlan,
    block_size: int,
    kv_heads: int,
    group: int,
    device: torch.device,
    processors: int,
    *,
    alone: bool = False,
) -> StepInputs:
    """`plan`, which computes some tokens, in tensors of its own: one copy to the device; `alone` as of `arrays_of`."""
    step = arrays_of(plan, block_size, group, alone=alone)
    return as_inputs(step, to_device(step.flat(), device), splits_for(step, kv_heads, processors))


def is_decode(plan: StepPlan) -> bool:
    """Whether `plan` computes one token of each of some sequences, and sums nothing up."""
    return plan.num_decodes > 0 and 4 * plan.num_decodes == len(plan.query_lens) and not plan.pools

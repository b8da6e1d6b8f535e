"""A step plan as tensors on a device: all that the kernels of a step read of it.

A decoder's `compute` reads nothing else, so that a CUDA graph of it can be captured over tensors that stay where
they are, and be replayed once the next plan's numbers lie in them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.engine.plan import StepPlan, as_int32
from services.executor.triton_kernels.launch import Batch, rows_for
from services.executor.triton_kernels.tiles import splits_of, tiles_of


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


def inputs_of(
    plan: StepPlan, block_size: int, kv_heads: int, group: int, device: torch.device, processors: int
) -> StepInputs:
    """`plan`, which computes some tokens, in tensors of its own: one copy to the device."""
    query_lens = as_int32(plan.query_lens).astype(np.int64)
    context_lens = as_int32(plan.context_lens).astype(np.int64)
    blocks = -(-context_lens // block_size)
    bounds = ((0, plan.num_decodes), (plan.num_decodes, len(query_lens)))
    parts = [(first, end) for first, end in bounds if end > first]
    rows = [rows_for(group, int(query_lens[first:end].max())) for first, end in parts]
    tiles = [
        tiles_of(query_lens[first:end], per_tile // group)
        for (first, end), per_tile in zip(parts, rows, strict=True)
    ]
    arrays = [
        as_int32(plan.token_ids),
        as_int32(plan.positions),
        as_int32(plan.slots),
        as_int32(plan.sample_rows),
        as_int32(plan.block_tables),
        np.cumsum(blocks) - blocks,
        np.concatenate(([0], np.cumsum(query_lens))),
        context_lens,
    ]
    for (first, _), part in zip(parts, tiles, strict=True):
        arrays += [part.sequence + first, part.first]
    token_ids, positions, slots, sample_rows, tables, starts, ends, lens, *placed = to_device(arrays, device)
    batches = [
        Batch(
            tables=tables,
            table_starts=starts,
            query_starts=ends,
            context_lens=lens,
            tile_sequence=placed[2 * index],
            tile_first=placed[2 * index + 1],
            rows_per_tile=rows[index],
            splits=splits_of(
                len(tiles[index].sequence) * kv_heads, int(context_lens[first:end].max()), processors
            ),
            first_row=int(query_lens[:first].sum()),
            num_rows=int(query_lens[first:end].sum()),
        )
        for index, (first, end) in enumerate(parts)
    ]
    return StepInputs(token_ids, positions, slots, sample_rows, batches)


def to_device(arrays: Sequence[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Each as int32 there. One copy for all of them: each costs as much as many bytes."""
    whole = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(device)
    return list(torch.split(whole, [len(array) for array in arrays]))

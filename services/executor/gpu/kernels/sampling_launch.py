"""The launches of `sampling.py`, in their order."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.gpu.kernels import sampling

BLOCK = 4096
"""Logits of a chunk: one turn of a program, so that memory is read by all of them at once. Each thread of `WARPS` has 16
of them; with 128 registers, as `tally` has for sm_90, two programs share a multiprocessor."""
WARPS = 8
NUM_PARAMS = 5
_WAYS = 16
_BITS = 4
_FLOAT_BITS = 32
_NARROW = {torch.bfloat16: 16}
"""Low bits of a float32 that are the same in all numbers of a type: 0, and 1 in the keys of negative ones."""


class Space(NamedTuple):
    """Working memory for up to R rows of up to C chunks."""

    prefixes: Tensor
    """int32 [2 * R]"""
    needs: Tensor
    """float64 [R]"""
    tallies: Tensor
    """float64 [R, C, 16]"""
    sums: Tensor
    """float64 [R, C]"""


def space_for(rows: int, width: int, device: torch.device) -> Space:
    chunks = _chunks(width)
    return Space(
        torch.empty(2 * rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float64, device=device),
        torch.empty((rows, chunks, _WAYS), dtype=torch.float64, device=device),
        torch.empty((rows, chunks), dtype=torch.float64, device=device),
    )


def draw(
    logits: Tensor,
    largest: Tensor,
    params: Tensor,
    tokens: Tensor,
    space: Space,
    most_by_logit: int,
    *,
    top_k: bool,
    top_p: bool,
) -> None:
    """Puts a token into each row of `tokens` int64 [R] whose temperature is above 0; the others keep theirs.

    `logits` [R, V], bf16 or float32, rows contiguous; `largest` float32 [R]; `params` float64 [5, R]: temperature,
    top-k (0: off), top-p, min-p, uniform in [0, 1). `top_k`, `top_p`: whether some row has it. Up to `most_by_logit`
    top-k compares logits, beyond it weights.
    """
    rows, width = logits.shape
    chunks = _chunks(width)
    block = min(BLOCK, triton.next_power_of_2(width))
    narrow = _NARROW.get(logits.dtype, 0)
    fill = (1 << narrow) - 1
    prefixes = space.prefixes[: 2 * rows].zero_()
    wide = triton.next_power_of_2(chunks)
    stride = logits.stride(0)
    for weights, wanted in ((False, top_k), (True, top_p)):
        for shift in range(_FLOAT_BITS - _BITS, narrow - 1, -_BITS) if wanted else ():
            sampling.tally[(rows, chunks)](
                logits, largest, params, prefixes, space.tallies, width, stride, rows, chunks, most_by_logit, shift,
                WEIGHTS=weights, FILL=fill, BLOCK=block, num_warps=WARPS,
            )  # fmt: skip
            sampling.choose[(rows,)](
                params, prefixes, space.tallies, space.needs, rows, chunks, shift, int(shift == _FLOAT_BITS - _BITS),
                WEIGHTS=weights, CHUNKS=wide,
            )  # fmt: skip
    sampling.weigh[(rows, chunks)](
        logits, largest, params, prefixes, space.sums, width, stride, rows, chunks, most_by_logit,
        FILL=fill, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    sampling.draw[(rows,)](
        logits, largest, params, prefixes, space.sums, tokens, width, stride, rows, chunks, most_by_logit,
        FILL=fill, BLOCK=block, CHUNKS=wide, num_warps=WARPS,
    )  # fmt: skip


def _chunks(width: int) -> int:
    return -(-width // BLOCK)

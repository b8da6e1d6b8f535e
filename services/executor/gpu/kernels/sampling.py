"""Draws from a step's logits, without sorting them: what `sampling/sampler.py` says, as launches
that wait for nothing on the host.

A filter is a threshold, and a threshold is found by its bits, four at a time, from the top: of the 16 values that the
next four may give, each program counts its share of a row, and the largest that still has enough above it stays.

    top-k   the largest key that k logits reach            enough: their number
    top-p   the largest key that a share p of the whole,   enough: the float64 sum of their weights
            of what top-k left, reaches
    draw    the first token whose running sum of weights exceeds uniform * total

    grid    tally: (rows, chunks of a row)    choose: (rows,)    weigh: (rows, chunks)    draw: (rows,)

Keys are the logits' bits, in the order of the numbers, so a threshold is exact and what ties with it is on its side.
bf16 logits have 16 bits that matter, and take half the turns. Weights are exp((logit - largest) / temperature), as the
sampler on the host has them; what differs between the two is the last bit of `exp`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# No argument is called `params`: Triton's binder has a variable of that name, and would pass that instead.
LOWEST = tl.constexpr(-2147483648)
WAYS = tl.constexpr(16)


@triton.jit
def key_of(x):
    """int32 keys in the order of float32 `x`, no NaN; both zeros have one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number_of(prefix, FILL: tl.constexpr):
    """The float32 whose key has the bits `prefix`, counted from the lowest key; FILL: bits that are not looked for,
    which are set in the keys of negative numbers."""
    key = prefix ^ LOWEST
    key = tl.where(key < 0, key | FILL, key)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_drawn(row_params, largest, row):
    """Whether the row is not greedy, and all of it numbers: others are told of, and nothing is drawn from them."""
    return (tl.load(row_params + row) > 0.0) & (tl.abs(tl.load(largest + row)) < float("inf"))


@triton.jit
def _is_off(row_params, row, rows, WEIGHTS: tl.constexpr):
    """Whether the row is greedy, or does without the filter that is sought: top-p (WEIGHTS), or top-k."""
    filtered = tl.load(row_params + 2 * rows + row) < 1.0 if WEIGHTS else tl.load(row_params + rows + row) > 0.0
    return (tl.load(row_params + row) <= 0.0) | (filtered == 0)


@triton.jit
def _weights_of(x, largest, temperature):
    return tl.exp(tl.div_rn(x - largest, temperature))


@triton.jit
def _tile(logits, row, chunk, width, stride, BLOCK: tl.constexpr):
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    return x, columns, inside


@triton.jit
def _in_top_k(x, weights, inside, row, largest, temperature, row_params, prefixes, rows, most, FILL: tl.constexpr):
    """What top-k leaves. Up to `most` it is the logits that count, beyond it their weights, as on the host."""
    k = tl.load(row_params + rows + row).to(tl.int32)
    threshold = tl.load(prefixes + row)
    least = _weights_of(_number_of(threshold, FILL), largest, temperature)
    by_logit = (k <= most) & (key_of(x) >= (threshold ^ LOWEST))
    return inside & ((k <= 0) | by_logit | ((k > most) & (weights >= least)))


@triton.jit(do_not_specialize=["rows", "chunks", "most", "shift"])
def tally_kernel(
    logits, largest, row_params, prefixes, tallies, width, stride, rows, chunks, most, shift,
    WEIGHTS: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): how many logits (WEIGHTS: how much weight of those that top-k leaves) reach each of the 16
    thresholds that the row's prefix allows.

    `logits` [rows, width]; `largest` float32 [rows]; `row_params` float64 [5, rows]: temperature, top-k (0: off), top-p,
    min-p, uniform; `prefixes` int32 [2, rows], of top-k and top-p; `tallies` float64 [rows, chunks, 16].
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _is_off(row_params, row, rows, WEIGHTS) | (_is_drawn(row_params, largest, row) == 0):
        return
    x, _, inside = _tile(logits, row, chunk, width, stride, BLOCK)
    prefix = tl.load(prefixes + row + (rows if WEIGHTS else 0))
    key = key_of(x)
    if WEIGHTS:
        highest, temperature = tl.load(largest + row), tl.load(row_params + row).to(tl.float32)
        weights = _weights_of(x, highest, temperature)
        inside = _in_top_k(x, weights, inside, row, highest, temperature, row_params, prefixes, rows, most, FILL)
        amounts = weights.to(tl.float64)
    else:
        amounts = tl.full([BLOCK], 1, tl.int32)
    into = tallies + (row * chunks + chunk) * WAYS
    for way in tl.static_range(0, 16):
        reached = inside & (key >= ((prefix | (way << shift)) ^ LOWEST))
        total = tl.sum(tl.where(reached, amounts, 0), 0)
        tl.store(into + way, total.to(tl.float64))


@triton.jit(do_not_specialize=["rows", "chunks", "shift", "first"])
def choose_kernel(
    row_params, prefixes, tallies, needs, rows, chunks, shift, first,
    WEIGHTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the next four bits of the row's prefix. CHUNKS: up to a power of two; `needs` float64 [rows]: what
    the weights must reach, noted by the first turn, which sees the whole."""
    row = tl.program_id(0)
    if _is_off(row_params, row, rows, WEIGHTS):
        return
    place = prefixes + row + (rows if WEIGHTS else 0)
    chunk, way = tl.arange(0, CHUNKS)[:, None], tl.arange(0, 16)[None, :]
    parts = tl.load(tallies + (row * chunks + chunk) * WAYS + way, mask=chunk < chunks, other=0.0)
    totals = tl.sum(parts, 0)
    ways = tl.arange(0, 16)
    if WEIGHTS:
        whole = tl.sum(tl.where(ways == 0, totals, 0.0), 0)
        need = tl.where(first != 0, tl.load(row_params + 2 * rows + row) * whole, tl.load(needs + row))
        tl.store(needs + row, need)
    else:
        need = tl.load(row_params + rows + row)
    # A share of 0 is reached by nothing at all: the most likely token is what it keeps.
    best = tl.max(tl.where((totals >= need) & (totals > 0.0), ways, 0), 0)
    tl.store(place, tl.load(place) | (best << shift))


@triton.jit
def _kept_weights(
    logits, largest, row_params, prefixes, row, chunk, width, stride, rows, most, FILL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """float64 weights of a chunk, 0 for what a filter drops, and their columns."""
    x, columns, inside = _tile(logits, row, chunk, width, stride, BLOCK)
    highest, temperature = tl.load(largest + row), tl.load(row_params + row).to(tl.float32)
    weights = _weights_of(x, highest, temperature)
    kept = _in_top_k(x, weights, inside, row, highest, temperature, row_params, prefixes, rows, most, FILL)
    nucleus = _weights_of(_number_of(tl.load(prefixes + rows + row), FILL), highest, temperature)
    whole = tl.where(tl.load(row_params + 2 * rows + row) >= 1.0, 1, 0)
    kept = kept & ((whole == 1) | (weights >= nucleus))
    kept = kept & (weights >= tl.load(row_params + 3 * rows + row).to(tl.float32))
    return tl.where(kept, weights, 0.0).to(tl.float64), columns


@triton.jit(do_not_specialize=["rows", "chunks", "most"])
def weigh_kernel(
    logits, largest, row_params, prefixes, sums, width, stride, rows, chunks, most,
    FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): what a chunk's kept tokens weigh together: `sums` float64 [rows, chunks]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _is_drawn(row_params, largest, row) == 0:
        return
    weights, _ = _kept_weights(
        logits, largest, row_params, prefixes, row, chunk, width, stride, rows, most, FILL, BLOCK
    )
    tl.store(sums + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["rows", "chunks", "most"])
def draw_kernel(
    logits, largest, row_params, prefixes, sums, tokens, width, stride, rows, chunks, most,
    FILL: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the drawn token into `tokens` int64 [rows]; rows that are not drawn keep what is there."""
    row = tl.program_id(0)
    if _is_drawn(row_params, largest, row) == 0:
        return
    chunk = tl.arange(0, CHUNKS)
    running = tl.cumsum(tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0), 0)
    total = tl.max(running, 0)
    target = tl.load(row_params + 4 * rows + row) * total
    # Sums differ in their last bits by how they are taken: where none exceeds the target, the last kept token is it.
    there = tl.min(tl.where((running > target) & (chunk < chunks), chunk, chunks - 1), 0)
    before = tl.sum(tl.where(chunk == there - 1, running, 0.0), 0)
    weights, columns = _kept_weights(
        logits, largest, row_params, prefixes, row, there, width, stride, rows, most, FILL, BLOCK
    )
    beyond = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
    found = tl.min(tl.where(beyond, columns, width), 0)
    last = tl.max(tl.where(weights > 0.0, columns, 0), 0)
    tl.store(tokens + row, tl.where(found < width, found, last).to(tl.int64))


# Logits of a chunk: one turn of a program, so that memory is read by all of them at once. Each thread of `WARPS` has 16
# of them; with 128 registers, as `tally` has for sm_90, two programs share a multiprocessor.
BLOCK = 4096
WARPS = 8
NUM_PARAMS = 5
_WAYS = 16
_BITS = 4
_FLOAT_BITS = 32
# Low bits of a float32 that are the same in all numbers of a type: 0, and 1 in the keys of negative ones.
_NARROW = {torch.bfloat16: 16}


class Space(NamedTuple):
    """Working memory for up to R rows of up to C chunks."""

    prefixes: Tensor  # int32 [2 * R]
    needs: Tensor  # float64 [R]
    tallies: Tensor  # float64 [R, C, 16]
    sums: Tensor  # float64 [R, C]


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
            tally_kernel[(rows, chunks)](
                logits, largest, params, prefixes, space.tallies, width, stride, rows, chunks, most_by_logit, shift,
                WEIGHTS=weights, FILL=fill, BLOCK=block, num_warps=WARPS,
            )  # fmt: skip
            choose_kernel[(rows,)](
                params, prefixes, space.tallies, space.needs, rows, chunks, shift, int(shift == _FLOAT_BITS - _BITS),
                WEIGHTS=weights, CHUNKS=wide,
            )  # fmt: skip
    weigh_kernel[(rows, chunks)](
        logits, largest, params, prefixes, space.sums, width, stride, rows, chunks, most_by_logit,
        FILL=fill, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    draw_kernel[(rows,)](
        logits, largest, params, prefixes, space.sums, tokens, width, stride, rows, chunks, most_by_logit,
        FILL=fill, BLOCK=block, CHUNKS=wide, num_warps=WARPS,
    )  # fmt: skip


def _chunks(width: int) -> int:
    return -(-width // BLOCK)

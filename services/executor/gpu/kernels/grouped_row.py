"""The product of a single row with weights that have scales for groups, without tensor cores: what `grouped.py` would
have them multiply is fifteen parts of sixteen nothing, and a group's sum would wait for one product after the other.

A program has ROWS outputs of a tile, and every lane its own sums until the end:

    words [ROWS, LANES] of a block    part p: sums += ((code - zero) * scale - minimum) * x[p]

A code becomes a number as the last bits of 2^23, whose unit in the last place is one: that takes two instructions and no
conversion, of which a processor makes an eighth as many. Splits of the inputs are added up as in `matmul.py`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels.grouped import (
    PARTS,
    PackedRows,
    codes_of,
    constants_of,
    of_table,
    tensors_of,
    words_of,
)
from services.executor.gpu.kernels.matmul import BLOCK_N, add_splits, room_for_splits


class RowTiles(NamedTuple):
    """How a program is laid out, and how many a processor should have."""

    rows: int
    warps: int
    stages: int
    programs: int


# Measured on an H100 with the products of an 8B, as fractions of what `grouped.py` takes: int4 0.91, q8_0 0.72, q6_k
# 0.57, q4_k 0.46.
WORDS = RowTiles(16, 2, 1, 8)
WORDS_UNDER_SCALES = RowTiles(32, 2, 1, 8)  # which more rows share
BYTES = RowTiles(16, 2, 3, 8)
LEAST_BLOCKS = 4  # that a split has: fewer, and adding the splits up costs more than it gains


@triton.jit
def _big(low, high, PART: tl.constexpr, BITS: tl.constexpr):
    """float32: 2^23 and the code of a part times `_unit` of it. Most codes stay where they are in their word."""
    if BITS == 8:
        word = high if PART >= 4 else low
        bits = (word >> (16 * (PART % 4 // 2))) & (255 << (8 * (PART % 2)))
    elif BITS == 4:
        bits = (low >> (16 * (PART // 4))) & (15 << (4 * (PART % 4)))
    elif BITS == 2:
        bits = low & (3 << (2 * PART))
    else:
        bits = codes_of(low, high, PART, BITS)
    return (bits | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(
    low, high, zero, PART: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr,
    TABLE: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
):  # fmt: skip
    """float32: what the codes of a part stand for but for scale and minimum, times UNIT. `zero`: float32, for each row."""
    if TABLE:
        number = of_table(codes_of(low, high, PART, BITS), T0, T1, T2, T3).to(tl.float32)
        if ZEROS:
            number -= zero[:, None]
    else:
        number = _big(low, high, PART, BITS)
        if ZEROS:
            number -= (8388608.0 + zero * UNIT)[:, None]
        else:
            number -= 8388608.0 + OFFSET * UNIT
    return number


@triton.constexpr_function
def _unit(part, bits, table):
    """How many times too large a code is where it lies in its word."""
    if bits == 8:
        return 1 << (8 * (part % 2))
    if bits == 4 and not table:
        return 1 << (4 * (part % 4))
    return 1 << (2 * part) if bits == 2 else 1


@triton.jit(do_not_specialize=["rows", "splits"])
def one_row_grouped_kernel(
    x, codes, high, scales, zeros, mins, supers, super_mins, bias, out, parts, arrivals,
    rows, outputs, columns, blocks, run, super_run, splits,
    ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(outputs, ROWS), splits). `x` bf16 [columns]; `out` bf16 [outputs]; `rows`: 1; all else as
    of `few_rows_grouped_kernel`. ROWS divides TILE."""
    place, split = tl.program_id(0), tl.program_id(1)
    tile, lane = place * ROWS // TILE, tl.arange(0, LANES)
    row = place * ROWS % TILE + tl.arange(0, ROWS)
    inside = row[:, None] * LANES + lane[None, :]
    of_groups = tl.cdiv(blocks, run) * GROUPS
    of_supers = tl.cdiv(blocks, super_run)
    first = tile.to(tl.int64) * blocks
    share = tl.cdiv(blocks, splits)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for block in tl.range(split * share, tl.minimum(split * share + share, blocks), num_stages=STAGES):
        low, top = words_of(codes, high, first + block, inside, LANES * TILE, BITS)
        if SUPERS:
            above = (tile * of_supers + block // super_run) * TILE + row
            over = tl.load(supers + above).to(tl.float32)
            if MINS:
                under = tl.load(super_mins + above).to(tl.float32)
        of_x = x + block * (8 * LANES) + lane
        at = (tile * of_groups + (block // run) * GROUPS) * TILE + row
        for part in tl.static_range(8):
            if part % (8 // GROUPS) == 0:
                group = part // (8 // GROUPS) * TILE
                scale = tl.load(scales + at + group).to(tl.float32)
                zero = scale
                if ZEROS:
                    zero = tl.load(zeros + at + group).to(tl.float32)
                if MINS:
                    least = tl.load(mins + at + group).to(tl.float32)
                if SUPERS:
                    scale *= over
                    if MINS:
                        least *= under
            if EVEN:
                values = tl.load(of_x + part * LANES).to(tl.float32)
            else:
                there = block * (8 * LANES) + part * LANES + lane < columns
                values = tl.load(of_x + part * LANES, mask=there, other=0.0).to(tl.float32)
            numbers = _numbers(
                low, top, zero, part, BITS, _unit(part, BITS, TABLE), OFFSET, ZEROS, TABLE, T0, T1, T2, T3
            )
            weights = numbers * (scale * (1.0 / _unit(part, BITS, TABLE)))[:, None]
            if MINS:
                weights -= least[:, None]
            sums += weights * values[None, :]
    add_splits(
        tl.sum(sums, 1)[:, None], bias, bias, out, parts, arrivals, tl.arange(0, 1), place * ROWS + tl.arange(0, ROWS), rows,
        outputs, splits, place, split, SPLIT, 3, BIAS,
    )  # fmt: skip


def tiles_of(weight: PackedRows) -> RowTiles:
    """By how much a program computes for each scale."""
    if weight.bits == 8:
        return BYTES
    return WORDS if weight.supers is None and weight.mins is None else WORDS_UNDER_SCALES


def splits_of(outputs: int, blocks: int, processors: int, tiles: RowTiles) -> int:
    """As many as give each processor its programs."""
    wanted = -(-tiles.programs * processors // -(-outputs // tiles.rows))
    return max(1, min(wanted, blocks // LEAST_BLOCKS))


def multiply_row_grouped(
    x: Tensor, weight: PackedRows, bias: Tensor | None, arrivals: Tensor, processors: int, out: Tensor
) -> None:
    """Fills `out` [1, outputs] from `x` [1, columns], both contiguous, times `weight`, plus `bias`. `arrivals` as of
    `multiply_few`."""
    tiles = tiles_of(weight)
    splits = splits_of(weight.outputs, weight.blocks, processors, tiles)
    one_row_grouped_kernel[(triton.cdiv(weight.outputs, tiles.rows), splits)](
        x, *tensors_of(weight), out if bias is None else bias, out, room_for_splits(out, splits), arrivals,
        1, weight.outputs, weight.columns, weight.blocks, weight.run, weight.super_run, splits,
        ROWS=tiles.rows, TILE=BLOCK_N, LANES=weight.lanes, STAGES=tiles.stages, SPLIT=splits > 1, **constants_of(weight),
        EVEN=weight.columns % (PARTS * weight.lanes) == 0, BIAS=bias is not None, num_warps=tiles.warps,
    )  # fmt: skip

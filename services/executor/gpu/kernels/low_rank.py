"""What LoRA adapters add to products: rows of one step use different adapters, whose factors lie where they were loaded.

    x [T, in]  ──shrink──▶ low [splits, parts, T, rank] float32 ──expand──▶ out [T, outputs] += B (A x)

Rows are in the order of their slots, cut into tiles of one slot each (`experts.sort`), so that a CUDA graph can hold
the launches: what a step has of rows and slots are tensors. A product may be several linears with their outputs end to
end (its parts), of which each has factors of its own. Where a slot's factors are is read from a table of addresses, so
memory is taken by the adapters that are there, of their own ranks. Of experts, tiles name the expert too.

Sources: Chen et al., "Punica", https://arxiv.org/abs/2310.18547; Sheng et al., "S-LoRA", https://arxiv.org/abs/2311.03285.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels import experts
from services.executor.gpu.kernels.experts import members_of

TILE = 16  # rows of a tile, the least of a matrix product
BLOCK_K = 64  # inputs of a turn
BLOCK_N = 64  # outputs of a program
LEAST_SHARE = 512  # inputs of a split, at least
MOST_SPLITS = 8
MOST_BLOCK_R = 64  # of the rank, in a program that shrinks
EXPAND_BLOCK_R = 32  # of the rank, in a turn of one that expands: more would spill registers


class LowRankRows(NamedTuple):
    """The rows of a step, or its pairs of rows and experts, by adapter."""

    order: Tensor  # int32 [rows]: rows in the order of their slots
    # int32 [4, bound]: slot, first place in `order`, how many rows, and which expert; 0 rows beyond the last
    tiles: Tensor
    each: int = 1  # pairs of each row of what is multiplied first


@triton.jit(do_not_specialize=["rows", "bound", "slots"])
def shrink_kernel(
    x, table, ranks, low, order, tiles, rows, bound, slots, inputs, x_stride, most,
    EACH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (bound, parts * cdiv(most, BLOCK_R), SPLITS). `x` [rows / EACH, inputs], rows `x_stride` apart; `table` int64
    [parts, slots, 2]: addresses of A [experts * rank, inputs] and of B; `ranks` int32 [parts, slots], multiples of 16, 0 for no factors;
    `low` float32 [SPLITS, parts, rows, most]."""
    tile, split = tl.program_id(0), tl.program_id(2)
    blocks = tl.cdiv(most, BLOCK_R)
    part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    slot, row, there, count = members_of(order, tiles, tile, bound, BLOCK_T)
    expert = tl.load(tiles + 3 * bound + tile)
    place = part * slots + slot
    rank = tl.multiple_of(tl.where(count > 0, tl.load(ranks + place), 0), 16)
    if block * BLOCK_R < rank:
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        a = tl.multiple_of(tl.load(table + place * 2), 16).to(tl.pointer_type(x.dtype.element_ty))
        of_a = a + (expert.to(tl.int64) * rank + r)[None, :] * inputs
        of_x = x + (row // EACH).to(tl.int64)[:, None] * x_stride
        share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLITS) * BLOCK_K
        begin = split * share
        sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for start in range(begin, tl.minimum(begin + share, inputs), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            values = tl.load(of_x + k[None, :], mask=there[:, None] & (k < inputs)[None, :], other=0.0)
            factor = tl.load(of_a + k[:, None], mask=(r < rank)[None, :] & (k < inputs)[:, None], other=0.0)
            if WIDE:  # the interpreter multiplies no bf16
                values, factor = values.to(tl.float32), factor.to(tl.float32)
            sums += tl.dot(values, factor, input_precision="ieee")
        into = ((split * (tl.num_programs(1) // blocks) + part).to(tl.int64) * rows + row)[:, None] * most
        tl.store(low + into + r[None, :], sums, mask=there[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["rows", "bound", "slots"])
def expand_kernel(
    out, table, ranks, starts, low, order, tiles, rows, bound, slots, out_stride, most,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (bound, cdiv(outputs of the widest part, BLOCK_N), PARTS). `out` [rows, outputs], to which is added; `starts`
    int32 [PARTS + 1]: where the outputs of each part begin; else as `shrink_kernel`."""
    tile, part = tl.program_id(0), tl.program_id(2)
    first = tl.load(starts + part)
    outputs = tl.load(starts + part + 1) - first
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, row, there, count = members_of(order, tiles, tile, bound, BLOCK_T)
    expert = tl.load(tiles + 3 * bound + tile)
    place = part * slots + slot
    rank = tl.multiple_of(tl.where(count > 0, tl.load(ranks + place), 0), 16)
    if (rank > 0) & (tl.program_id(1) * BLOCK_N < outputs):
        b = tl.multiple_of(tl.load(table + place * 2 + 1), 16).to(tl.pointer_type(out.dtype.element_ty))
        of_b = b + (expert.to(tl.int64) * outputs + n)[None, :] * rank
        sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            inside = there[:, None] & (r < rank)[None, :]
            values = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for split in range(SPLITS):
                at = ((split * PARTS + part).to(tl.int64) * rows + row)[:, None] * most + r[None, :]
                values += tl.load(low + at, mask=inside, other=0.0)
            factor = tl.load(of_b + r[:, None], mask=(r < rank)[:, None] & (n < outputs)[None, :], other=0.0)
            values = values.to(factor.dtype)
            if WIDE:
                values, factor = values.to(tl.float32), factor.to(tl.float32)
            sums += tl.dot(values, factor, input_precision="ieee")
        into = out + row.to(tl.int64)[:, None] * out_stride + (first + n)[None, :]
        whole = there[:, None] & (n < outputs)[None, :]
        made = tl.load(into, mask=whole, other=0.0).to(tl.float32)
        tl.store(into, (made + sums).to(out.dtype.element_ty), mask=whole)


def rows_by_slot(slots: Tensor, count: int) -> LowRankRows:
    """Of `slots` int32 [T], those that are negative or `count` and more of no adapter."""
    chosen = torch.where(slots < 0, count, slots).clamp(max=count).unsqueeze(1).contiguous()
    sorted_rows = experts.sort(chosen, chosen, count, TILE)
    tiles = sorted_rows.tiles
    return LowRankRows(sorted_rows.order, torch.cat((tiles, torch.zeros_like(tiles[:1]))))


def pairs_by_slot(slots: Tensor, chosen: Tensor, count: int, most: int) -> LowRankRows:
    """Of rows with `slots` int32 [T] of `count`, each of whose experts `chosen` int32 [T, K], `most` for none, is a pair
    in a tile of its own."""
    rows, each = chosen.shape
    of_pairs = slots.repeat_interleave(each)
    experts_of = chosen.flatten()
    there = (of_pairs >= 0) & (of_pairs < count) & (experts_of < most)
    order = torch.arange(rows * each, dtype=torch.int32, device=slots.device)
    columns = (torch.where(there, of_pairs, 0), order, there.int(), torch.where(there, experts_of, 0))
    return LowRankRows(order, torch.stack([column.int() for column in columns]), each)


def add_low_rank(
    out: Tensor, x: Tensor, table: Tensor, ranks: Tensor, starts: Tensor, widest: int, most: int, rows: LowRankRows
) -> None:
    """Adds to `out` [rows, outputs] what the adapters make of `x`. `widest`: outputs of the widest part; `most`: the
    highest rank there may be, rounded up to 16; the tables are those of the kernels."""
    parts, slots = ranks.shape
    bound, count, inputs = rows.tiles.shape[1], rows.order.numel(), x.shape[1]
    splits = max(1, min(MOST_SPLITS, inputs // LEAST_SHARE))
    block = min(triton.next_power_of_2(most), MOST_BLOCK_R)
    low = torch.empty((splits, parts, count, most), dtype=torch.float32, device=x.device)
    shrink_kernel[(bound, parts * triton.cdiv(most, block), splits)](
        x, table, ranks, low, rows.order, rows.tiles, count, bound, slots, inputs, x.stride(0), most,
        EACH=count // len(x), SPLITS=splits, BLOCK_T=TILE, BLOCK_R=block, BLOCK_K=BLOCK_K, WIDE=x.device.type == "cpu",
    )  # fmt: skip
    expand_kernel[(bound, triton.cdiv(widest, BLOCK_N), parts)](
        out, table, ranks, starts, low, rows.order, rows.tiles, count, bound, slots, out.stride(0), most,
        PARTS=parts, SPLITS=splits, BLOCK_T=TILE, BLOCK_R=min(block, EXPAND_BLOCK_R), BLOCK_N=BLOCK_N,
        WIDE=x.device.type == "cpu",
    )  # fmt: skip

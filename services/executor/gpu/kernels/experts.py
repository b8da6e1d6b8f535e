"""Mixtures of experts: which experts each row goes to, rows in the order of experts, and products with stacked weights.

    logits [T, experts] ──choose──▶ experts and weights [T, K] ──sort──▶ pairs in the order of experts, cut into tiles

    x [T, hidden]  ──gate and up──▶ [T * K, 2 * inner] ──activation──▶ ──down──▶ [T * K, hidden] ──combine──▶ [T, hidden]

A pair is a row and one of its experts: pair t * K + j is row t and its j-th. Nothing is moved: a tile is up to so many
pairs of one expert, of which its products read the rows and write the outputs where they are. How many tiles there are
follows from the pairs alone, so that a CUDA graph can hold the launches; those that are left over multiply nothing.
An expert without rows is not read. What experts make of a row is added in the order in which they were chosen, which
follows from the row alone.

Sources: Shazeer et al., "Outrageously Large Neural Networks", https://arxiv.org/abs/1701.06538; DeepSeek-AI,
"DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 2.1.2, for sigmoid scores, corrections and groups.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels.codes import PLAIN
from services.executor.gpu.kernels.elementwise import VALUES
from services.executor.gpu.kernels.grouped import PARTS, PackedRows, constants_of, grouped_sums, tensors_of
from services.executor.gpu.kernels.grouped import STAGES as GROUPED_STAGES
from services.executor.gpu.kernels.matmul import (
    BLOCK_K,
    BLOCK_N,
    LEAST_SHARE,
    PROGRAMS,
    STAGES,
    add_splits,
    bits_of,
    code_of,
    room_for_splits,
    sums_of_rows,
)

# What an expert counts at least, and where its score is no number: it is chosen when no other is left.
LOWEST = tl.constexpr(-1.0e30)
NOWHERE = tl.constexpr(float("-inf"))  # what counts that is no expert, or was chosen


@triton.jit
def choose_kernel(
    logits, correction, slots, chosen, weights, stride, scale,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). `logits` float32 [rows, COUNT], rows `stride` apart; `correction` float32 [COUNT], read where
    CORRECTED; `slots` [rows]: a row with a negative one goes to expert COUNT, which is none. `chosen` int32, `weights`
    float32 [rows, CHOSEN]. BLOCK_G, BLOCK_E, BLOCK_K: groups, experts of a group, CHOSEN, up to powers of two. Of those
    that tie the first is chosen."""
    row = tl.program_id(0)
    size: tl.constexpr = COUNT // GROUPS
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert = group[:, None] * size + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < size)[None, :]
    value = tl.load(logits + row.to(tl.int64) * stride + expert, mask=inside, other=LOWEST)
    # Comparisons, which leave NaN as it is, where maxima would not.
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(tl.where(value < -80.0, 80.0, -value)))
    else:
        value = tl.where(value < LOWEST, LOWEST, value)
        score = tl.where(inside, tl.exp(value - tl.max(tl.max(value, 1), 0)), 0.0)
        score = score / tl.sum(tl.sum(score, 1), 0)
    counts = score
    if CORRECTED:
        counts += tl.load(correction + expert, mask=inside, other=0.0)
    counts = tl.where(counts == counts, tl.maximum(counts, LOWEST), LOWEST)
    counts = tl.where(inside, counts, NOWHERE)
    if GROUPS > 1:
        best = tl.max(counts, 1)
        if size > 1:
            rest = tl.where(member[None, :] == tl.argmax(counts, 1)[:, None], NOWHERE, counts)
            best += tl.max(rest, 1)
        best = tl.where(group < GROUPS, tl.maximum(best, LOWEST), NOWHERE)
        kept = group < 0
        for _ in range(TOP_GROUPS):
            top = tl.argmax(best, 0)
            kept = kept | (group == top)
            best = tl.where(group == top, NOWHERE, best)
        counts = tl.where(kept[:, None], counts, NOWHERE)
    counts = tl.reshape(counts, [BLOCK_G * BLOCK_E])
    score = tl.reshape(score, [BLOCK_G * BLOCK_E])
    number, place = tl.arange(0, BLOCK_G * BLOCK_E), tl.arange(0, BLOCK_K)
    picked = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for at in range(CHOSEN):
        top = tl.argmax(counts, 0)
        picked = tl.where(place == at, top // BLOCK_E * size + top % BLOCK_E, picked)
        weight = tl.where(place == at, tl.sum(tl.where(number == top, score, 0.0), 0), weight)
        counts = tl.where(number == top, NOWHERE, counts)
    if NORMALIZED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    picked = tl.where(tl.load(slots + row) < 0, COUNT, picked)
    into = row.to(tl.int64) * CHOSEN + place
    tl.store(chosen + into, picked, mask=place < CHOSEN)
    tl.store(weights + into, weight * scale, mask=place < CHOSEN)


@triton.jit(do_not_specialize=["pairs", "bound"])
def sort_kernel(
    chosen, order, tiles, pairs, bound,
    COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (COUNT,), a program for each expert. `chosen` int32 [pairs], COUNT for none; `order` int32 [pairs]: pairs in
    the order of experts, those of one in their own. `tiles` int32 [3, bound]: expert, first place in `order`, and how
    many pairs, ROWS at most; 0 beyond the last. BLOCK_E: more than COUNT, a power of two."""
    expert = tl.program_id(0)
    number = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(chosen + at, mask=at < pairs, other=COUNT), BLOCK_E)
    cut = (counts + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(number < expert, counts, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    first = tl.sum(tl.where(number < expert, cut, 0), 0)
    end = first + (count + ROWS - 1) // ROWS
    # The last expert's program ends the tiles that nobody has.
    last = tl.where(expert == COUNT - 1, bound, end)
    for start in range(first, last, BLOCK_E):
        tile = start + number
        done = (tile - first) * ROWS
        tl.store(tiles + tile, expert + tile * 0, mask=tile < last)
        tl.store(tiles + bound + tile, begin + done, mask=tile < last)
        tl.store(tiles + 2 * bound + tile, tl.minimum(tl.maximum(count - done, 0), ROWS), mask=tile < last)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(chosen + at, mask=at < pairs, other=COUNT) == expert
        ones = mine.to(tl.int32)
        tl.store(order + begin + tl.cumsum(ones, 0) - 1, at, mask=mine)
        begin += tl.sum(ones, 0)


@triton.jit
def members_of(order, tiles, tile, bound, BLOCK_T: tl.constexpr):
    """(expert, its pairs [BLOCK_T], which of them are there [BLOCK_T], how many) of a tile of `sort_kernel`"""
    expert = tl.load(tiles + tile)
    count = tl.load(tiles + 2 * bound + tile)
    place = tl.arange(0, BLOCK_T)
    there = place < count
    pair = tl.load(order + tl.load(tiles + bound + tile) + place, mask=there, other=0)
    return expert, pair, there, count


@triton.jit(do_not_specialize=["pairs", "bound", "splits"])
def expert_rows_kernel(
    x, codes, scales, out, parts, arrivals, order, tiles, pairs, bound, outputs, inputs, x_stride, splits,
    EACH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    CODE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (bound, cdiv(outputs, BLOCK_N), splits). `x` [pairs / EACH, inputs], rows `x_stride` apart; `codes` [experts *
    outputs, inputs] and `scales` [experts * outputs] as of `few_rows_kernel`, and so are `parts` and `arrivals`, of
    pairs for rows; `out` [pairs, outputs]."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, pair, there, count = members_of(order, tiles, group, bound, BLOCK_T)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), splits) * BLOCK_K
    begin = split * share
    end = tl.where(count > 0, tl.minimum(begin + share, inputs), begin)
    row = expert.to(tl.int64) * outputs
    of_codes = codes + (row + n)[:, None] * inputs
    of_x = x + (pair // EACH).to(tl.int64)[None, :] * x_stride
    sums = sums_of_rows(of_codes, of_x, n < outputs, there, begin, end, BLOCK_N, BLOCK_T, BLOCK_K, CODE, WIDE)
    t = tl.where(there, pair, pairs)
    add_splits(
        sums, scales + row, scales, out, parts, arrivals, t, n, pairs, outputs, splits,
        tile * tl.num_programs(0) + group, split, SPLIT, CODE, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "bound", "splits"])
def expert_groups_kernel(
    x, codes, high, scales, zeros, mins, supers, super_mins, out, parts, arrivals, order, tiles,
    pairs, bound, outputs, columns, blocks, run, super_run, x_stride, splits,
    EACH: tl.constexpr, BLOCK_T: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr,
    OFFSET: tl.constexpr, TABLE: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`expert_rows_kernel`, with weights that have scales for groups, of whole tiles for each expert; all else as of
    `few_rows_grouped_kernel`."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, pair, there, count = members_of(order, tiles, group, bound, BLOCK_T)
    share = tl.cdiv(blocks, splits)
    begin = split * share
    end = tl.where(count > 0, tl.minimum(begin + share, blocks), begin)
    of_x = x + (pair // EACH).to(tl.int64)[None, :] * x_stride
    sums = grouped_sums(
        of_x, codes, high, scales, zeros, mins, supers, super_mins, expert * tl.num_programs(1) + tile, begin, end,
        columns, blocks, run, super_run,
        BLOCK_T, TILE, LANES, BITS, GROUPS, ZEROS, MINS, SUPERS, OFFSET, TABLE, T0, T1, T2, T3, EVEN, WIDE,
    )  # fmt: skip
    t = tl.where(there, pair, pairs)
    n = tile * TILE + tl.arange(0, TILE)
    add_splits(
        sums, out, out, out, parts, arrivals, t, n, pairs, outputs, splits,
        tile * tl.num_programs(0) + group, split, SPLIT, 3, False,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    made, chosen, weights, shared, logits, out, width, stride,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(width, BLOCK)). `made` [rows * CHOSEN, width], weighted by `weights`, where `chosen` names an
    expert; where SHARED with `shared` [rows, width], where GATED times the sigmoid of column COUNT of `logits`;
    `out` [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for one in range(CHOSEN):
        pair = row * CHOSEN + one
        end = tl.where(tl.load(chosen + pair) < COUNT, width, 0)
        value = tl.load(made + pair * width + at, mask=at < end, other=0.0).to(tl.float32)
        total += tl.where(at < end, tl.load(weights + pair) * value, 0.0)
    if SHARED:
        value = tl.load(shared + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            value *= 1.0 / (1.0 + tl.exp(-tl.load(logits + row * stride + COUNT)))
        total += value
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=inside)


MOST_TILE = 64  # pairs of a tile
_AT_ONCE = 1024  # pairs that a program sorts at a time


class RoutingRule(NamedTuple):
    """How experts are chosen: see `model.lowering.RouterConfig`."""

    chosen: int  # of a row
    sigmoid: bool = False  # whether scores are; else they are softmax's
    normalized: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Routed(NamedTuple):
    """Where the rows of a step go."""

    chosen: Tensor  # int32 [T, K]: experts; as many as there are: none
    weights: Tensor  # float32 [T, K]
    order: Tensor  # int32 [T * K]
    tiles: Tensor  # int32 [3, bound]; see `sort_kernel`
    rows: int  # of a tile, at most


def route(
    logits: Tensor, correction: Tensor | None, slots: Tensor, count: int, rule: RoutingRule, rows: int = 0
) -> Routed:
    """Of `logits` float32 [T, count or more], T at least one. `rows`: of a tile; 0: by how many pairs an expert has."""
    tokens, most = len(logits), rule.chosen
    chosen = torch.empty((tokens, most), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, most), dtype=torch.float32, device=logits.device)
    groups, members = (triton.next_power_of_2(n) for n in (rule.groups, count // rule.groups))
    choose_kernel[(tokens,)](
        logits, logits if correction is None else correction, slots, chosen, weights, logits.stride(0), rule.scale,
        COUNT=count, CHOSEN=most, GROUPS=rule.groups, TOP_GROUPS=rule.top_groups,
        BLOCK_G=groups, BLOCK_E=members, BLOCK_K=triton.next_power_of_2(most),
        SIGMOID=rule.sigmoid, CORRECTED=correction is not None, NORMALIZED=rule.normalized,
        num_warps=1 if groups * members <= 512 else 4,
    )  # fmt: skip
    return sort(chosen, weights, count, rows)


def sort(chosen: Tensor, weights: Tensor, count: int, rows: int = 0) -> Routed:
    """Of `chosen` int32 [T, K], contiguous, of `count` experts, and `weights` float32 [T, K]. `rows` as of `route`."""
    pairs = chosen.numel()
    rows = rows or min(max(16, triton.next_power_of_2(-(-pairs // count))), MOST_TILE)
    bound = (pairs + (rows - 1) * min(count, pairs)) // rows
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((3, bound), dtype=torch.int32, device=chosen.device)
    sort_kernel[(count,)](
        chosen, order, tiles, pairs, bound,
        COUNT=count, ROWS=rows, BLOCK_E=triton.next_power_of_2(count + 1), BLOCK=_AT_ONCE,
    )  # fmt: skip
    return Routed(chosen, weights, order, tiles, rows)


def splits_for(routed: Routed, outputs: int, inputs: int, processors: int) -> int:
    """As many as give each of `processors` its programs; 0: one."""
    if not processors:
        return 1
    programs = routed.tiles.shape[1] * -(-outputs // BLOCK_N)
    most = max(1, inputs // (LEAST_SHARE * BLOCK_K))
    return min(-(-PROGRAMS * processors // programs), most)


def arrivals_of(processors: int, device: torch.device) -> Tensor:
    """What splits are counted in: where there are any, there are fewer tiles than this."""
    return torch.zeros(max(1, PROGRAMS * processors), dtype=torch.int32, device=device)


def multiply_stacked(
    x: Tensor, weight: Tensor, scales: Tensor | None, routed: Routed, outputs: int, arrivals: Tensor, splits: int
) -> Tensor:
    """[T * K, outputs] of `x` [T or T * K, in] and `weight` [experts * outputs, in], plain or codes with `scales` float32
    [experts * outputs]. `arrivals`: no two products with them may run at the same time."""
    pairs, inputs = routed.order.numel(), weight.shape[1]
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    parts = room_for_splits(out, splits)
    code, values = (PLAIN, weight) if scales is None else (code_of(weight), bits_of(weight))
    grid = (routed.tiles.shape[1], triton.cdiv(outputs, BLOCK_N), splits)
    expert_rows_kernel[grid](
        x, values, out if scales is None else scales, out, parts, arrivals, routed.order, routed.tiles, pairs, grid[0],
        outputs, inputs, x.stride(0), splits,
        EACH=pairs // len(x), BLOCK_T=routed.rows, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K // values.element_size(),
        SPLIT=splits > 1, num_stages=STAGES, CODE=code, WIDE=x.device.type == "cpu",
    )  # fmt: skip
    return out


def multiply_stacked_groups(x: Tensor, weight: PackedRows, routed: Routed, arrivals: Tensor, splits: int) -> Tensor:
    """The same by a `PackedRows.stacked` weight; `x` in the order of its columns."""
    pairs = routed.order.numel()
    out = torch.empty((pairs, weight.outputs), dtype=x.dtype, device=x.device)
    parts = room_for_splits(out, splits)
    grid = (routed.tiles.shape[1], triton.cdiv(weight.outputs, BLOCK_N), splits)
    expert_groups_kernel[grid](
        x, *tensors_of(weight), out, parts, arrivals, routed.order, routed.tiles, pairs, grid[0], weight.outputs,
        weight.columns, weight.blocks, weight.run, weight.super_run, x.stride(0), splits,
        EACH=pairs // len(x), BLOCK_T=routed.rows, TILE=BLOCK_N, LANES=weight.lanes, SPLIT=splits > 1,
        num_stages=GROUPED_STAGES, **constants_of(weight),
        EVEN=weight.columns % (PARTS * weight.lanes) == 0, WIDE=x.device.type == "cpu",
    )  # fmt: skip
    return out


def combine(
    made: Tensor, routed: Routed, count: int, shared: Tensor | None = None, logits: Tensor | None = None
) -> Tensor:
    """[T, width] of what experts have `made` [T * K, width]; `shared` [T, width]: the shared expert's, gated where `logits`
    float32 have a column for it behind those of the `count` experts."""
    logits = routed.weights if logits is None else logits
    tokens, chosen = routed.chosen.shape
    width = made.shape[1]
    out = torch.empty((tokens, width), dtype=made.dtype, device=made.device)
    combine_kernel[(tokens, triton.cdiv(width, VALUES))](
        made, routed.chosen, routed.weights, made if shared is None else shared, logits, out, width, logits.stride(0),
        COUNT=count, CHOSEN=chosen, BLOCK=VALUES, SHARED=shared is not None,
        GATED=shared is not None and logits.shape[1] > count,
    )  # fmt: skip
    return out

"""Sparse attention: summaries of full blocks, and the blocks that a row reads (`core/sparse_attention.py`).

    summarise    mean and deviation of a block's keys, as they are kept, by KV head
    score        of each block between a row's sinks and its recent ones, for each KV head
    choose       a row's table for each KV head: sinks, the best blocks between, recent ones, its own

`attention.attend` reads these tables as any. Scores are float32, summed in one order whatever else is computed; of
blocks that tie the earlier is chosen. The best are found without sorting, by the bits of the least score among them:

    threshold = the largest key that `top` scores reach, two bits at a time, from the highest; keys as of sampling
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels.attention_launch import AttentionCall, AttentionLayer, code_of, readable
from services.executor.gpu.kernels.codes import code_to_float
from services.executor.gpu.kernels.sampling import LOWEST, key_of

# Numbers of a choice: the row among the step's, where its sequence's table begins, the first block behind the sinks,
# the first recent one, how many between them are read, and the row's own block.
FIELDS = 6
_FIELDS = tl.constexpr(FIELDS)
SCORED = 64  # blocks of one program that scores
CHOSEN = 2048  # blocks of one turn of a program that chooses
_COUNT = tl.constexpr(21)  # bits of a count of blocks, of which three lie in one number
_TWO_COUNTS = tl.constexpr(42)
_MASK = tl.constexpr((1 << 21) - 1)


@triton.jit(do_not_specialize_on_alignment=["pairs", "positions", "slots"])
def summarise_kernel(
    keys, scales, summaries, pairs, positions, slots,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, KV_HEADS): one head's summary of a block.

    CODE 0: grid (T, KV_HEADS), of which those rows that are the last of a block write its summary: `positions`, `slots`
    integers [T]; else `pairs` int64 [C, 2]: writable block, place among the quantized ones. `keys`, with `scales` of int8 and
    e4m3, are those of all blocks [blocks, 2, KV_HEADS, SIZE, WIDTH], `summaries` [blocks, 2, KV_HEADS, 1, WIDTH].
    BLOCK_S, BLOCK_D: SIZE and WIDTH, up to powers of two.
    """
    at, head = tl.program_id(0), tl.program_id(1)
    if CODE == 0:
        slot = tl.load(slots + at).to(tl.int64)
        block = slot // SIZE
        full = (slot >= 0) & (tl.load(positions + at) % SIZE == SIZE - 1)
    else:
        block = tl.load(pairs + at * 2 + 1)
        full = block >= 0
    if full:
        line = block * (2 * KV_HEADS) + head
        token, column = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
        inside = (token < SIZE) & (column < WIDTH)
        raw = tl.load(keys + (line * SIZE + token) * WIDTH + column, mask=inside, other=0.0)
        key = code_to_float(raw, CODE, tl.float32)
        unit = 1.0
        if CODE != 0 and CODE != 3:
            unit = tl.load(scales + line)
        mean = tl.sum(key, 0) * (1.0 / SIZE)
        apart = tl.where(inside, key - mean[None, :], 0.0)
        deviation = tl.sqrt(tl.sum(apart * apart, 0) * (1.0 / SIZE))
        columns = tl.arange(0, BLOCK_D)
        target = summaries + line * WIDTH + columns
        kind: tl.constexpr = summaries.dtype.element_ty
        tl.store(target, (mean * unit).to(kind), mask=columns < WIDTH)
        tl.store(target + KV_HEADS * WIDTH, (deviation * unit).to(kind), mask=columns < WIDTH)


@triton.jit
def _lines(
    writable, quantized, block, there, num_writable, head, SIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D]: the means (SIDE 0) or deviations (1) of the keys of `block` int32 [BLOCK_N]."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    is_writable = there & (block < num_writable)
    line = (block.to(tl.int64) * 2 + SIDE) * KV_HEADS + head
    inside = is_writable[:, None] & (columns < WIDTH)
    found = tl.load(writable + line[:, None] * WIDTH + columns, mask=inside, other=0.0)
    if CODE != 0:
        is_quantized = there & (block >= num_writable)
        line -= num_writable.to(tl.int64) * (2 * KV_HEADS)
        inside = is_quantized[:, None] & (columns < WIDTH)
        kept = tl.load(quantized + line[:, None] * WIDTH + columns, mask=inside, other=0.0)
        found = tl.where(is_quantized[:, None], kept, found)
    return found


@triton.jit
def _product(q, lines, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """float32 [BLOCK_M, BLOCK_N]: q lines^T."""
    if WIDE:
        product = tl.dot(q.to(tl.float32), tl.trans(lines.to(tl.float32)), input_precision=PRECISION)
    else:
        product = tl.dot(q, tl.trans(lines), input_precision=PRECISION)
    return product


@triton.jit(
    do_not_specialize=["num_writable", "most", "deviations"], do_not_specialize_on_alignment=["tables", "choices"]
)
def score_kernel(
    query, writable, quantized, tables, choices, scores, num_writable, most, deviations,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, CODE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV_HEADS, `most` / BLOCK_N, rounded up): the scores of some blocks for a row and KV head.

    `query` [T, KV_HEADS, GROUP, WIDTH]; `writable`, `quantized` [blocks, 2, KV_HEADS, 1, WIDTH]: summaries, of which `quantized` are
    those of blocks from `num_writable` on, where CODE is not 0; `tables` int32; `choices` int32 [rows, FIELDS]; `scores`
    float32 [rows, KV_HEADS, most]. `deviations`: how many times its deviation a block is scored above its mean.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    begin = tl.program_id(2) * BLOCK_N
    choice = choices + index * _FIELDS
    first = tl.load(choice + 2)
    between = tl.load(choice + 3) - first
    if (tl.load(choice + 4) > 0) & (begin < between):
        row = tl.load(choice).to(tl.int64)
        lanes, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)[None, :]
        asked = ((row * KV_HEADS + head) * GROUP + lanes) * WIDTH + columns
        q = tl.load(query + asked, mask=(lanes < GROUP) & (columns < WIDTH), other=0.0)
        at = begin + tl.arange(0, BLOCK_N)
        there = at < between
        block = tl.load(tables + tl.load(choice + 1) + first + at, mask=there, other=0)
        mean = _lines(writable, quantized, block, there, num_writable, head, 0, KV_HEADS, WIDTH, BLOCK_D, CODE)
        near = _product(q, mean, PRECISION, WIDE)
        deviation = _lines(writable, quantized, block, there, num_writable, head, 1, KV_HEADS, WIDTH, BLOCK_D, CODE)
        total = near + deviations * _product(tl.abs(q), deviation, PRECISION, WIDE)
        best = tl.max(tl.where(lanes < GROUP, total, float("-inf")), 0)
        place = (index.to(tl.int64) * KV_HEADS + head) * most + at
        tl.store(scores + place, best, mask=there)


@triton.jit
def _copied(source, target, first, end, BLOCK: tl.constexpr):
    """Copies the numbers [first, end) of `source` to `target`."""
    for begin in range(first, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < end
        tl.store(target + at - first, tl.load(source + at, mask=inside, other=0), mask=inside)


@triton.jit
def _keys(scores, begin, count, BLOCK: tl.constexpr):
    """int32 keys in the order of `scores` from `begin` on, and which of them there are."""
    at = begin + tl.arange(0, BLOCK)
    inside = at < count
    return key_of(tl.load(scores + at, mask=inside, other=float("-inf"))), inside


@triton.jit
def _threshold(scores, count, top, BLOCK: tl.constexpr):
    """The largest int32 key that `top` of `count` scores reach."""
    nothing = count * 0  # a number of 32 bits, as all that is made with it
    prefix = nothing
    for turn in range(16):
        shift = nothing + 30 - 2 * turn
        packed = nothing.to(tl.int64)
        for begin in range(0, count, BLOCK):
            key, inside = _keys(scores, begin, count, BLOCK)
            reach1 = (inside & (key >= ((prefix | (1 << shift)) ^ LOWEST))).to(tl.int64)
            reach2 = (inside & (key >= ((prefix | (2 << shift)) ^ LOWEST))).to(tl.int64)
            reach3 = (inside & (key >= ((prefix | (3 << shift)) ^ LOWEST))).to(tl.int64)
            packed += tl.sum(reach1 + (reach2 << _COUNT) + (reach3 << _TWO_COUNTS), 0)
        digit = ((packed & _MASK) >= top).to(tl.int32) + (((packed >> _COUNT) & _MASK) >= top).to(tl.int32)
        digit += ((packed >> _TWO_COUNTS) >= top).to(tl.int32)
        prefix = prefix | (digit << shift)
    return prefix ^ LOWEST


@triton.jit(do_not_specialize=["most", "length"], do_not_specialize_on_alignment=["tables", "choices"])
def choose_kernel(
    scores, tables, choices, chosen, most, length, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV_HEADS): the blocks that a row reads for a KV head, in their order, to `chosen` int32 [rows,
    KV_HEADS, length]. `scores` float32 [rows, KV_HEADS, most], `tables` and `choices` as of `score_kernel`."""
    index, head = tl.program_id(0), tl.program_id(1)
    place = index.to(tl.int64) * KV_HEADS + head
    choice = choices + index * _FIELDS
    table = tables + tl.load(choice + 1)
    first, recent = tl.load(choice + 2), tl.load(choice + 3)
    top, own = tl.load(choice + 4), tl.load(choice + 5)
    target = chosen + place * length
    _copied(table, target, 0, first, BLOCK)
    _copied(table, target + first + top, recent, own + 1, BLOCK)
    if top > 0:
        count = recent - first
        mine = scores + place * most
        threshold = _threshold(mine, count, top, BLOCK)
        above = count * 0
        for begin in range(0, count, BLOCK):
            key, inside = _keys(mine, begin, count, BLOCK)
            above += tl.sum((inside & (key > threshold)).to(tl.int32), 0)
        ties = top - above
        written, tied = first, count * 0
        for begin in range(0, count, BLOCK):
            key, inside = _keys(mine, begin, count, BLOCK)
            equal = (inside & (key == threshold)).to(tl.int32)
            is_tie = (equal > 0) & (tied + tl.cumsum(equal, 0) <= ties)
            taken = ((inside & (key > threshold)) | is_tie).to(tl.int32)
            block = tl.load(table + first + begin + tl.arange(0, BLOCK), mask=inside, other=0)
            tl.store(target + written + tl.cumsum(taken, 0) - 1, block, mask=taken > 0)
            written += tl.sum(taken, 0)
            tied += tl.sum(equal, 0)


class ChosenRows(NamedTuple):
    """Rows of a step that read some blocks only, on the device."""

    tables: Tensor  # int32: the sequences' block tables
    choices: Tensor  # int32 [rows, FIELDS]
    most: int  # blocks that are scored for a row, at most; 0: for none
    length: int  # blocks that a row reads, at most


def summarise(
    layer: AttentionLayer,
    summaries: AttentionLayer,
    pairs: Tensor | None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Writes the summaries of the blocks that a step has filled in `layer`: of `pairs` int64 [C, 2] (writable block, place
    among the quantized ones) where blocks are kept in another form; else of the blocks whose last token is among the T whose
    `positions` and `slots`, integers [T], are given."""
    code = code_of(layer)
    rows = pairs if code else slots
    if rows is None:
        return
    _, _, kv_heads, size, width = layer.writable.shape
    arguments = {
        "keys": readable(layer.codes) if code else layer.writable,
        "scales": layer.writable if layer.scales is None else layer.scales,
        "summaries": summaries.codes if code else summaries.writable,
        "pairs": rows, "positions": rows if code else positions, "slots": rows,
    }  # fmt: skip
    sizes = {
        "KV_HEADS": kv_heads, "SIZE": size, "WIDTH": width, "BLOCK_S": triton.next_power_of_2(size),
        "BLOCK_D": triton.next_power_of_2(width), "CODE": code,
    }  # fmt: skip
    AttentionCall(summarise_kernel, (len(rows), kv_heads), arguments, sizes).run()


def choose(query: Tensor, summaries: AttentionLayer | None, rows: ChosenRows, deviations: float) -> Tensor:
    """int32 [rows, kv heads, length]: the tables of what `rows` read, of `query` [T, kv heads, group, d], contiguous;
    `summaries` of their layer, which windows do without."""
    kv_heads = query.shape[1]
    size = (len(rows.choices), kv_heads)
    scores = torch.empty((*size, max(1, rows.most)), dtype=torch.float32, device=query.device)
    chosen = torch.empty((*size, rows.length), dtype=torch.int32, device=query.device)
    for call in choose_calls(query, summaries, rows, deviations, scores, chosen):
        call.run()
    return chosen


def choose_calls(
    query: Tensor, summaries: AttentionLayer | None, rows: ChosenRows, deviations: float, scores: Tensor, chosen: Tensor
) -> list[AttentionCall]:
    count, (kv_heads, group, width) = len(rows.choices), query.shape[1:]
    calls = []
    if rows.most:
        assert summaries is not None, "admission refuses what needs summaries where there are none"
        arguments = {
            "query": query, "writable": summaries.writable, "quantized": summaries.codes, "tables": rows.tables,
            "choices": rows.choices, "scores": scores, "num_writable": summaries.writable.shape[0], "most": rows.most,
            "deviations": deviations,
        }  # fmt: skip
        sizes = {
            "KV_HEADS": kv_heads, "GROUP": group, "WIDTH": width, "BLOCK_M": max(16, triton.next_power_of_2(group)),
            "BLOCK_N": SCORED, "BLOCK_D": triton.next_power_of_2(width), "CODE": code_of(summaries),
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "WIDE": query.device.type == "cpu",
        }  # fmt: skip
        calls.append(AttentionCall(score_kernel, (count, kv_heads, triton.cdiv(rows.most, SCORED)), arguments, sizes))
    given = {
        "scores": scores, "tables": rows.tables, "choices": rows.choices, "chosen": chosen,
        "most": rows.most, "length": rows.length,
    }  # fmt: skip
    calls.append(AttentionCall(choose_kernel, (count, kv_heads), given, {"KV_HEADS": kv_heads, "BLOCK": CHOSEN}))
    return calls

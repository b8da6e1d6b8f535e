"""Products with quantised weights, by how many rows `x` has.

                rows          e4m3                                     int8, and codes with scales for groups
    few         to 32, 128    weights widened in registers, activations in bf16 (`kernels/matmul.py`, `grouped.py`)
    many        more          activations to e4m3, a scale for each    weights widened into a scratch, a part at
                              row, torch._scaled_mm                    a time, torch.addmm in bf16

Few rows take as long as the weights take to be read: one byte each, not two. On an H200 (4.8 TB/s; 790 and 1580 dense
TFLOP/s of bf16 and fp8, which a kernel of Triton's may reach half of) a weight is read in 0.21 ps and multiplied by one
row in 2.5 fs of bf16 tensor cores, 5 fs of Triton's: up to some 40 rows the reading is longer.

    e4m3   `_scaled_mm` reads as few bytes and is fast at any size, but rounds activations, which costs quality, and
           needs a launch for it, some 2 us: it takes over where multiplying begins to take longer than reading.
    int8   Activations in 255 even steps lose the small values of a row to its largest, and models of billions of
           weights have rows whose largest is a hundred times the rest (Dettmers et al., "LLM.int8()",
           https://arxiv.org/abs/2208.07339). So `torch._int_mm` is not used: weights are widened, which takes
           3 bytes a weight, 0.63 ps, whatever the rows: half of the product at 512, an eighth at 2048.

`_scaled_mm` scaled by rows takes a row-major [T, in] and a column-major [in, out], both sizes of the weight multiples
of 16, scales float32 [T, 1] and [1, out], and gives bf16; weights of other sizes are widened instead. Its fast sums
keep some 14 bits (DeepSeek-AI, "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 3.3.2), little beside the
three bits of e4m3's mantissa.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from services.executor.gpu.attention import processors_of
from services.executor.gpu.kernels.grouped import PARTS, PackedRows, multiply_grouped, widened
from services.executor.gpu.kernels.grouped_row import multiply_row_grouped
from services.executor.gpu.kernels.matmul import (
    BATCH_INVARIANT_PROCESSORS,
    BATCH_INVARIANT_ROWS,
    BLOCK_N,
    MOST_ROWS,
    arrivals_for,
    decode_rows,
    encode_rows,
    multiply_alike,
    multiply_few,
    multiply_one,
    tiles_of,
)
from services.executor.kv_cache.codecs import FP8
from services.executor.model.quantized import QuantizedRows
from services.executor.model.weight_formats import Quantized

FEW = {torch.float8_e4m3fn: 32, torch.int8: MOST_ROWS}  # rows up to which weights are widened in registers
MULTIPLE = 16  # of the sizes that `_scaled_mm` takes
SCRATCH = 64 << 20  # bytes of widened weights

# Bits of a code: (its lowest, its highest), packed by themselves.
_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_AT_ONCE = 1 << 24  # codes that are packed together

# (codes [T, in], scales [T], weight codes [out, in], weight scales [out], bias) -> bf16 [T, out]
Scaled = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scaled_by_rows(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """`Scaled` by the library, on a GPU."""
    return torch._scaled_mm(  # noqa: SLF001  # no public name before torch 2.10, whose `scaled_mm` is beta
        codes,
        weight.t(),
        scale_a=scales.unsqueeze(1),
        scale_b=weight_scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class PlainProduct:
    """With a weight in bf16. By the library, but for a single row: on an H100 it reads the weights of an 8B's layers 6%
    slower than `multiply_one`, whose rows lie side by side in memory as its programs take them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return multiply_one(x if x.stride(1) == 1 else x.contiguous(), self._weight, None, self._bias)
        return functional.linear(x, self._weight, self._bias)


class CodedProduct:
    """With a quantised weight."""

    def __init__(self, weight: Quantized, bias: Tensor | None, scaled: Scaled | None) -> None:
        """`scaled`: what multiplies many rows; None: they are multiplied by widened weights."""
        self._weight, self._bias, self._scaled = weight, bias, scaled
        outputs, device = len(weight.codes), weight.codes.device
        self._few = FEW[weight.codes.dtype] if scaled is not None else MOST_ROWS
        self._arrivals = arrivals_for(outputs, device)
        self._processors = processors_of(device)

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self._weight
        if len(x) <= self._few:
            return multiply_few(x, codes, scales, self._bias, self._arrivals, self._processors)
        if self._scaled is not None:
            return self._scaled(*encode_rows(x, FP8), codes, scales, self._bias)
        return multiply_widened(x, self._weight, self._bias)


class InvariantProduct:
    """With a plain weight or codes with a scale for each row, in tiles and splits that depend on its shape alone."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        self._codes = weight if isinstance(weight, Tensor) else weight.codes
        self._scales = None if isinstance(weight, Tensor) else weight.scales
        self._bias = bias
        self._arrivals = arrivals_for(len(self._codes), self._codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_alike(x, self._codes, self._scales, self._bias, self._arrivals)


class GroupedProduct:
    """With codes that have scales for groups. `invariant`: in tiles and splits that depend on its shape alone."""

    def __init__(self, weight: PackedRows, bias: Tensor | None, *, invariant: bool = False) -> None:
        self._weight, self._bias, self._invariant = weight, bias, invariant
        self._arrivals = arrivals_for(weight.outputs, weight.device)
        self._processors = processors_of(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._weight, self._bias
        x = in_order(x, weight)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((len(x), weight.outputs), dtype=x.dtype, device=x.device)
        if self._invariant:
            cut = tiles_of(BATCH_INVARIANT_ROWS, weight.outputs, weight.columns, BATCH_INVARIANT_PROCESSORS)
            for first in range(0, len(x), MOST_ROWS):
                end = first + MOST_ROWS
                multiply_grouped(x[first:end], weight, bias, self._arrivals, cut, out[first:end])
        elif len(x) > MOST_ROWS:
            multiply_widened_groups(x, weight, bias, out)
        elif len(x) == 1:
            multiply_row_grouped(x, weight, bias, self._arrivals, self._processors, out)
        elif len(x):
            cut = tiles_of(len(x), weight.outputs, weight.columns, self._processors)
            multiply_grouped(x, weight, bias, self._arrivals, cut, out)
        return out


def in_order(x: Tensor, weight: PackedRows) -> Tensor:
    """`x` [T, in], or [T, columns]: its inputs in the order of the columns of `weight`."""
    if weight.order is None:
        return x
    x = x.index_select(1, weight.order)
    return x if weight.idle is None else x.masked_fill_(weight.idle, 0)


def coded_product(weight: Quantized, bias: Tensor | None, scaled: Scaled | None = scaled_by_rows) -> CodedProduct:
    """By the kind and the sizes of `weight`."""
    fits = weight.codes.dtype == FP8.dtype and not any(size % MULTIPLE for size in weight.codes.shape)
    return CodedProduct(weight, bias, scaled if fits else None)


def multiply_widened(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """`x` [T, in] times weights in its dtype, of which there are some `SCRATCH` bytes at a time."""
    out = torch.empty((len(x), len(weight.codes)), dtype=x.dtype, device=x.device)
    inputs = weight.codes.shape[1]
    _by_parts(x, inputs, lambda first, wide: decode_rows(*weight.rows(first, first + len(wide)), wide), bias, out)
    return out


def multiply_widened_groups(x: Tensor, weight: PackedRows, bias: Tensor | None, out: Tensor) -> None:
    """The same into `out` [T, outputs]; `x` in the order of the weight's columns."""
    _by_parts(x, weight.columns, lambda first, wide: widened(weight, first, wide), bias, out)


def _by_parts(x: Tensor, inputs: int, widen: Callable[[int, Tensor], None], bias: Tensor | None, out: Tensor) -> None:
    """`widen` fills [rows, `inputs`] with the weight's rows from its first argument on."""
    outputs = out.shape[1]
    scratch = x.new_empty((min(outputs, max(1, SCRATCH // (inputs * x.element_size()))), inputs))
    for first in range(0, outputs, len(scratch)):
        wide = scratch[: outputs - first]
        end = first + len(wide)
        widen(first, wide)
        if bias is None:
            torch.mm(x, wide.t(), out=out[:, first:end])
        else:
            torch.addmm(bias[first:end], x, wide.t(), out=out[:, first:end])


class PackedLookup:
    """Rows of a packed weight, by their numbers."""

    def __init__(self, weight: PackedRows, dtype: torch.dtype) -> None:
        assert weight.order is None, "rows are looked up in the order of the inputs"
        self._weight, self._dtype = weight, dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, inputs] of `rows` integers [T], each below the weight's outputs"""
        out = torch.empty((len(rows), self._weight.inputs), dtype=self._dtype, device=rows.device)
        widened(self._weight, 0, out, rows)
        return out


def packed_rows(weight: QuantizedRows) -> PackedRows:
    """`weight`, packed where it is."""
    lanes = 32 if weight.groups == 1 or weight.group % 32 == 0 else 16
    block = PARTS * lanes
    weight = _servable(weight, block)
    low, high = _PLANES[weight.bits]
    blocks = -(-weight.columns_stored // block)
    groups = 1 if weight.groups == 1 else max(1, block // weight.group)
    run = blocks if weight.groups == 1 else max(1, weight.group // block)
    order = weight.permutation
    unused = None if order is None else order < 0
    return PackedRows(
        outputs=weight.outputs,
        inputs=weight.inputs,
        columns=weight.columns_stored,
        bits=weight.bits,
        codes=_packed_codes(weight.codes, 0, low, lanes),
        high=_packed_codes(weight.codes, low, high, lanes) if high else None,
        scales=_packed_scales(weight.scales, groups),
        zeros=None if weight.zeros is None else _packed_scales(weight.zeros, groups),
        mins=None if weight.mins is None else _packed_scales(weight.mins, groups),
        supers=None if weight.supers is None else _packed_scales(weight.supers, 1),
        super_mins=None if weight.super_mins is None else _packed_scales(weight.super_mins, 1),
        groups=groups,
        run=run,
        super_run=max(1, weight.per * weight.group // block) if weight.groups > 1 else blocks,
        offset=weight.offset,
        table=weight.table,
        order=None if order is None else order.clamp(min=0).long(),
        idle=unused if unused is not None and bool(unused.any()) else None,
    )


def stacked_rows(weight: QuantizedRows, count: int) -> PackedRows:
    """`weight` of `count` experts, [experts * out, in], packed where it is: whole tiles for each."""
    each = weight.outputs // count
    if each % BLOCK_N == 0:
        return replace(packed_rows(weight), outputs=each)
    return PackedRows.stacked(
        [packed_rows(weight.rows(first, first + each)) for first in range(0, weight.outputs, each)]
    )


def _servable(weight: QuantizedRows, block: int) -> QuantizedRows:
    """The same values in what the kernels know: groups that divide a `block` or are whole ones; scales above scales for
    whole blocks; tables of sixteen; zero points that leave bf16 whole numbers."""
    strange = weight.table and weight.bits != 4
    inexact = weight.offset > 128 if weight.bits < 8 else weight.zeros is not None and weight.offset
    if strange or inexact:
        weight = weight.plain(weight.bits, weight.group)
    if weight.groups == 1:
        return weight
    if weight.group % block:
        weight = weight.regrouped(math.gcd(weight.group, block))
    if weight.supers is not None and weight.per * weight.group % block:
        scales, mins = weight.level_scales()  # exact: 11 bits by 8
        weight = replace(weight, scales=scales, mins=mins, supers=None, super_mins=None, per=1)
    return weight


def _packed_codes(codes: Tensor, shift: int, width: int, lanes: int) -> Tensor:
    """The bits [shift, shift + width) of `codes` uint8 [out, columns]."""
    outputs, columns = codes.shape
    block = PARTS * lanes
    tiles, blocks = -(-outputs // BLOCK_N), -(-columns // block)
    words = 2 if width == 8 else 1
    shape = (tiles, blocks, words, BLOCK_N, lanes)
    packed = torch.zeros(shape, dtype=_KINDS[width], device=codes.device)
    step = max(1, _AT_ONCE // (BLOCK_N * blocks * block))
    for first in range(0, tiles, step):
        some = codes[first * BLOCK_N : (first + step) * BLOCK_N]
        count = -(-len(some) // BLOCK_N)
        filled = torch.zeros((count * BLOCK_N, blocks * block), dtype=torch.uint8, device=codes.device)
        filled[: len(some), :columns] = (some >> shift) & ((1 << width) - 1)
        by_part = filled.view(count, BLOCK_N, blocks, words, PARTS // words, lanes).permute(4, 0, 2, 3, 1, 5)
        word = torch.zeros(by_part.shape[1:], dtype=torch.int32, device=codes.device)
        for part, bits in enumerate(by_part):
            word |= bits.int() << (width * part)
        packed[first : first + count] = word.to(packed.dtype)
    return packed if words == 2 else packed.squeeze(2)


def _packed_scales(scales: Tensor, of_block: int) -> Tensor:
    """[tiles, groups, 64] of [out, groups]; of groups up to whole blocks, `of_block` each."""
    outputs, groups = scales.shape
    tiles, padded = -(-outputs // BLOCK_N), -(-groups // of_block) * of_block
    filled = torch.zeros((tiles * BLOCK_N, padded), dtype=scales.dtype, device=scales.device)
    filled[:outputs, :groups] = scales
    return filled.view(tiles, BLOCK_N, padded).transpose(1, 2).contiguous()

"""Matrix products with weights of eight bits, which are widened in registers; and the rounding of activations.

A product of few rows takes as long as its weights take to be read, so a weight of half the bytes takes half the time.
Codes, int8 or e4m3, are numbers that bf16 holds exactly: they are multiplied as they are, in bf16 with float32 sums, and
a row's scale is applied to its sum:

    out[t, n] = (sum over k of x[t, k] * code[n, k]) * scale[n] + bias[n]

    few_rows    the tile of weights is the left side of the product, 16 or more of its rows for one of tokens: tensor
                cores want 64 rows of that side and are content with 8 of the other, of which decoding has few

                        weights [BLOCK_N, inputs]            x [tokens, inputs], transposed
                        ┌────────┬────────┬────────┐         ┌────┐
                        │ split 0│ split 1│ split 2│    x    │    │    each split is a program of its own where
                        └────────┴────────┴────────┘         └────┘    there are fewer tiles than processors

    one_row     no tensor cores: what they would multiply is fifteen parts of sixteen nothing

The program that comes last for its tile adds up the splits, in their order: sums do not depend on who was last.
Sources: NVIDIA, "Efficient GEMM in CUDA", section "Parallelized Reductions" (split-K), CUTLASS documentation; PTX ISA,
"Memory Consistency Model", for the hand-over between programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels.codes import E4M3, INT8, PLAIN, code_to_float, float_to_code
from services.executor.kv_cache.codecs import FP8, SMALLEST_SCALE, Codec


@triton.jit
def _widened(raw, CODE: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of the weights as they lie in memory, in bf16; WIDE: in float32, for the interpreter."""
    if WIDE:
        return code_to_float(raw, CODE, tl.float32)
    if CODE == 3:
        return raw
    if CODE == 2:
        # The processor's own conversion: integer arithmetic would take longer than the weights take to arrive.
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return raw.to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows", "splits"])  # else a step of 16 rows compiles what one of 15 has
def few_rows_kernel(
    x, codes, scales, bias, out, parts, arrivals, rows, outputs, inputs, x_stride, splits,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    CODE: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(rows, BLOCK_T), cdiv(outputs, BLOCK_N), splits): tiles of the same weights run side by side.

    `x` bf16 [rows, inputs], rows `x_stride` apart; `codes` int8 (of e4m3 the bits) [outputs, inputs], or PLAIN weights
    in x's dtype, which have no scales; `scales` float32 [outputs]; `bias` [outputs]; `out` bf16 [rows, outputs]. Where SPLIT: `parts` float32 [splits, rows, outputs];
    `arrivals` int32, a zero for each tile of `out`, and zeros again afterwards: one launch at a time may use them.
    WIDE: products in float32, for the interpreter, which knows no bf16.
    """
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = group * BLOCK_T + tl.arange(0, BLOCK_T)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), splits) * BLOCK_K
    begin = split * share
    end = tl.minimum(begin + share, inputs)
    of_codes = codes + n.to(tl.int64)[:, None] * inputs
    of_x = x + t.to(tl.int64)[None, :] * x_stride
    sums = sums_of_rows(of_codes, of_x, n < outputs, t < rows, begin, end, BLOCK_N, BLOCK_T, BLOCK_K, CODE, WIDE)
    add_splits(
        sums, scales, bias, out, parts, arrivals, t, n, rows, outputs, splits, tile * tl.num_programs(0) + group, split,
        SPLIT, CODE, BIAS,
    )  # fmt: skip


@triton.jit
def sums_of_rows(
    of_codes, of_x, rows_there, tokens_there, begin, end,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, CODE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T]: rows of weights at `of_codes` [BLOCK_N, 1] by tokens at `of_x` [1, BLOCK_T], over the
    inputs from `begin` to `end`; those that are not there are zeros."""
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        raw = tl.load(of_codes + k[None, :], mask=rows_there[:, None] & (k < end)[None, :], other=0)
        values = tl.load(of_x + k[:, None], mask=tokens_there[None, :] & (k < end)[:, None], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        sums = tl.dot(_widened(raw, CODE, WIDE), values, sums, input_precision="ieee")
    return sums


@triton.jit
def add_splits(
    sums, scales, bias, out, parts, arrivals, t, n, rows, outputs, splits, place, split,
    SPLIT: tl.constexpr, CODE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The end of a program that has `sums` [outputs `n`, rows `t`] of its split: of those for one `place` the last to
    arrive adds them all up, and finishes."""
    inside = (n < outputs)[:, None] & (t < rows)[None, :]
    into = t.to(tl.int64)[None, :] * outputs + n[:, None]
    if not SPLIT:
        _finish(sums, scales, bias, out, n, outputs, into, inside, CODE, BIAS)
    else:
        stride = rows.to(tl.int64) * outputs
        tl.store(parts + split * stride + into, sums, mask=inside)
        # All of this program's stores come before its arrival, and all arrivals before what the last one reads.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + place, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            total = tl.zeros(sums.shape, tl.float32)
            for other in range(splits):
                total += tl.load(parts + other * stride + into, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + place, 0)
            _finish(total, scales, bias, out, n, outputs, into, inside, CODE, BIAS)


@triton.jit
def _finish(sums, scales, bias, out, n, outputs, place, inside, CODE: tl.constexpr, BIAS: tl.constexpr):
    if CODE != 3:
        scale = tl.load(scales + n, mask=n < outputs, other=0.0)
        sums = sums * scale[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def one_row_kernel(
    x, codes, scales, bias, out, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    CODE: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(outputs, BLOCK_N),): `few_rows` of a single row, without its splits. PLAIN codes are bf16 weights, which
    have no scales."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_codes = codes + n.to(tl.int64)[:, None] * inputs
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        raw = tl.load(of_codes + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0)
        values = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        sums += _widened(raw, CODE, WIDE).to(tl.float32) * values[None, :]
    total = tl.sum(sums, 1)
    if CODE != 3:
        total *= tl.load(scales + n, mask=n < outputs, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def encode_rows_kernel(x, codes, scales, inputs, x_stride, limit, smallest, BLOCK: tl.constexpr, CODE: tl.constexpr):
    """Grid (rows,): each row of `x` [rows, inputs], rows `x_stride` apart, as `codes` int8 (of e4m3 the bits) [rows,
    inputs] and a scale float32. One pass: the row stays in registers. BLOCK: `inputs`, up to a power of two. What
    `Codec.encode` says; a row with NaN gets it for its scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < inputs
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    extreme = tl.max(tl.abs(values), 0)
    # NaN compares with nothing.
    strange = tl.sum(tl.where(values != values, 1, 0), 0) > 0
    # Divided as IEEE 754 rounds: the plain operator may be off by two units on a GPU.
    scale = tl.where(strange, float("nan"), tl.maximum(tl.div_rn(extreme, limit), smallest))
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale + tl.zeros_like(values)), -limit), limit)
    tl.store(codes + row * inputs + at, float_to_code(scaled, CODE), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def decode_rows_kernel(codes, scales, out, inputs, BLOCK: tl.constexpr, CODE: tl.constexpr):
    """Grid (rows, cdiv(inputs, BLOCK)): `out` [rows, inputs] of `codes` int8 (of e4m3 the bits) and `scales`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inputs
    values = code_to_float(tl.load(codes + row * inputs + at, mask=inside, other=0), CODE, tl.float32)
    values = values * tl.load(scales + row)
    tl.store(out + row * inputs + at, values.to(out.dtype.element_ty), mask=inside)


MOST_ROWS = 128  # of `multiply_few`: beyond, its tiles would read the weights again and again
BLOCK_N = 64  # outputs of a tile: the rows that a group of four warps multiplies at once on Hopper
BLOCK_K = 128
# Tiles of weights on their way: 4 of 8 KB, and two programs on a processor, are twice what must be on its way to keep
# 4.8 TB/s busy for 700 ns on 132 processors.
STAGES = 4
ONE_ROW_N, ONE_ROW_K = 16, 512  # rows and bytes of a tile of `one_row`: 8 KB too
# Tiles along the inputs that a split has at least: fewer, and adding the splits up costs more than it gains.
LEAST_SHARE = 4
PROGRAMS = 2  # that a processor should have
# Rows of activations in a tile of `multiply_alike`: those of decoding are few, those of prompts many.
BATCH_INVARIANT_ROWS = 64
# For which its splits are chosen, an H200's: another number would be another order of sums.
BATCH_INVARIANT_PROCESSORS = 132
DECODED = 2048  # numbers that a program of `decode_rows` widens


class MatmulTiles(NamedTuple):
    """How a product of few rows is cut."""

    block_t: int
    groups: int  # tiles along the rows of activations
    tiles: int  # along the outputs
    splits: int


def tiles_of(rows: int, outputs: int, inputs: int, processors: int) -> MatmulTiles:
    """For `rows`, 1 to `MOST_ROWS`: as many splits as give each processor its programs."""
    block_t = min(max(16, 1 << (rows - 1).bit_length()), 64)
    groups, tiles = -(-rows // block_t), -(-outputs // BLOCK_N)
    wanted = -(-PROGRAMS * processors // (groups * tiles))
    most = max(1, inputs // (LEAST_SHARE * BLOCK_K))
    return MatmulTiles(block_t, groups, tiles, min(wanted, most))


def arrivals_for(outputs: int, device: torch.device) -> Tensor:
    """What `multiply_few` counts in, for weights of so many `outputs`."""
    return torch.zeros(-(-outputs // BLOCK_N) * -(-MOST_ROWS // 16), dtype=torch.int32, device=device)


def multiply_few(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, arrivals: Tensor, processors: int
) -> Tensor:
    """`x` [T, in], T at most `MOST_ROWS`, times `codes` [out, in] with `scales` float32 [out], plus `bias`: [T, out].

    `arrivals` belongs to this weight; no two products with it may run at the same time.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    outputs = len(codes)
    if rows == 1:
        return multiply_one(x, codes, scales, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        _multiply(x, codes, scales, bias, arrivals, tiles_of(rows, outputs, inputs, processors), out)
    return out


def multiply_alike(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """`x` [T, in] times `weight` [out, in], plus `bias`: [T, out], each row with the bits that it has alone.

    Tiles and splits are those of `BATCH_INVARIANT_ROWS` rows on `BATCH_INVARIANT_PROCESSORS`, whatever there is. Rows
    are multiplied `MOST_ROWS` at a time, for the splits' sums take memory. Without `scales` `weight` is in `x`'s dtype.
    `arrivals` as of `multiply_few`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    outputs, inputs = weight.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    cut = tiles_of(BATCH_INVARIANT_ROWS, outputs, inputs, BATCH_INVARIANT_PROCESSORS)
    for first in range(0, len(x), MOST_ROWS):
        end = first + MOST_ROWS
        _multiply(x[first:end], weight, scales, bias, arrivals, cut, out[first:end])
    return out


def _multiply(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor,
    cut: MatmulTiles,
    out: Tensor,
) -> None:
    """Fills `out` [T, out] from `x` [T, in], T at most `MOST_ROWS`; without `scales` by `weight` in `x`'s dtype."""
    (rows, inputs), outputs = x.shape, len(weight)
    code, values = (PLAIN, weight) if scales is None else (code_of(weight), bits_of(weight))
    few_rows_kernel[(triton.cdiv(rows, cut.block_t), cut.tiles, cut.splits)](
        x, values, out if scales is None else scales, out if bias is None else bias, out, room_for_splits(out, cut.splits),
        arrivals, rows, outputs, inputs, x.stride(0), cut.splits,
        BLOCK_T=cut.block_t, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K // values.element_size(), SPLIT=cut.splits > 1,
        num_stages=STAGES, CODE=code, BIAS=bias is not None, WIDE=x.device.type == "cpu",
    )  # fmt: skip


def room_for_splits(out: Tensor, splits: int) -> Tensor:
    """float32 [splits, *out.shape]: what the splits of a product make; of a single one `out`, which is not read."""
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device) if splits > 1 else out


def multiply_one(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """`multiply_few` of one row; without `scales` by `weight` [out, in] in `x`'s dtype."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    code, values = (PLAIN, weight) if scales is None else (code_of(weight), bits_of(weight))
    one_row_kernel[(triton.cdiv(outputs, ONE_ROW_N),)](
        x, values, out if scales is None else scales, out if bias is None else bias, out, outputs, inputs,
        BLOCK_N=ONE_ROW_N, BLOCK_K=ONE_ROW_K // values.element_size(), STAGES=STAGES,
        CODE=code, BIAS=bias is not None, WIDE=x.device.type == "cpu",
    )  # fmt: skip
    return out


def encode_rows(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """(codes [T, in] of `codec`, scales float32 [T]) of `x` [T, in]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=codec.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(inputs)
        encode_rows_kernel[(rows,)](
            x, bits_of(codes), scales, inputs, x.stride(0), codec.limit, SMALLEST_SCALE,
            BLOCK=block, CODE=code_of(codes), num_warps=max(1, min(block // 1024, 16)),
        )  # fmt: skip
    return codes, scales


def decode_rows(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fills `out` [rows, in], contiguous, from `codes` [rows, in] and `scales` float32 [rows]."""
    rows, inputs = codes.shape
    if rows:
        decode_rows_kernel[(rows, triton.cdiv(inputs, DECODED))](
            bits_of(codes), scales, out, inputs, BLOCK=DECODED, CODE=code_of(codes)
        )


def code_of(codes: Tensor) -> int:
    return E4M3 if codes.dtype == FP8.dtype else INT8


def bits_of(codes: Tensor) -> Tensor:
    """e4m3's codes as the bytes that they are."""
    return codes.view(torch.int8)

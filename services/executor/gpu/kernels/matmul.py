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

import triton
import triton.language as tl

from services.executor.gpu.kernels.codes import code_to_float, float_to_code


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
def few_rows(
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
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        raw = tl.load(of_codes + k[None, :], mask=(n < outputs)[:, None] & (k < end)[None, :], other=0)
        values = tl.load(of_x + k[:, None], mask=(t < rows)[None, :] & (k < end)[:, None], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        sums = tl.dot(_widened(raw, CODE, WIDE), values, sums, input_precision="ieee")

    inside = (n < outputs)[:, None] & (t < rows)[None, :]
    place = t.to(tl.int64)[None, :] * outputs + n[:, None]
    if not SPLIT:
        _finish(sums, scales, bias, out, n, outputs, place, inside, CODE, BIAS)
    else:
        stride = rows.to(tl.int64) * outputs
        tl.store(parts + split * stride + place, sums, mask=inside)
        # All of this program's stores come before its arrival, and all arrivals before what the last one reads.
        tl.debug_barrier()
        mine = arrivals + tile * tl.num_programs(0) + group
        if tl.atomic_add(mine, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for other in range(splits):
                total += tl.load(parts + other * stride + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(mine, 0)
            _finish(total, scales, bias, out, n, outputs, place, inside, CODE, BIAS)


@triton.jit
def _finish(sums, scales, bias, out, n, outputs, place, inside, CODE: tl.constexpr, BIAS: tl.constexpr):
    if CODE != 3:
        scale = tl.load(scales + n, mask=n < outputs, other=0.0)
        sums = sums * scale[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def one_row(
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
def encode_rows(x, codes, scales, inputs, x_stride, limit, smallest, BLOCK: tl.constexpr, CODE: tl.constexpr):
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
def decode_rows(codes, scales, out, inputs, BLOCK: tl.constexpr, CODE: tl.constexpr):
    """Grid (rows, cdiv(inputs, BLOCK)): `out` [rows, inputs] of `codes` int8 (of e4m3 the bits) and `scales`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inputs
    values = code_to_float(tl.load(codes + row * inputs + at, mask=inside, other=0), CODE, tl.float32)
    values = values * tl.load(scales + row)
    tl.store(out + row * inputs + at, values.to(out.dtype.element_ty), mask=inside)

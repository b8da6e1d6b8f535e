"""Codes of compressed KV blocks in registers: the same as `kv_cache/codecs.py` makes and reads, bit for bit.

e4m3 is rounded by integer arithmetic, which alone gives PyTorch's codes; where hardware does not know it, it is decoded so too:

    e4m3     s eeee mmm                 float16  s 0eeee mmm0000000       value of e4m3 = 2^8 * value of float16
"""

import triton
import triton.language as tl

INT8, E4M3, PLAIN = 1, 2, 3  # CODE of the kernels; 0: there are no compressed blocks
# 1.5 * 2^23: added and taken away, it rounds a float32 to whole numbers, ties to even.
ROUND = tl.constexpr(12582912.0)
ROUND_SMALL = tl.constexpr(24576.0)  # 1.5 * 2^14: the same to multiples of 2^-9, the smallest e4m3


@triton.jit
def code_to_float(raw, CODE: tl.constexpr, kind: tl.constexpr):
    """Codes as numbers of dtype `kind`: int8; e4m3, or its bits as int8 where nothing knows it; PLAIN: what they are."""
    if CODE == 2 and raw.dtype == tl.int8:
        # A sign that was extended has filled the highest exponent bit.
        wide = (raw.to(tl.int16) << 7) & -0x4001
        value = (wide.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(kind)
    elif CODE == 2:
        # One instruction for two of them, to float16 alone.
        value = raw.to(tl.float16).to(kind)
    elif kind == tl.bfloat16:
        value = raw.to(tl.float32).to(kind)
    else:
        value = raw.to(kind)
    return value


@triton.jit
def _byte(words, AT: tl.constexpr, CODE: tl.constexpr, kind: tl.constexpr):
    """The codes in byte AT of `words`, as numbers of dtype `kind`."""
    return code_to_float(((words << (24 - 8 * AT)) >> 24).to(tl.int8), CODE, kind)


@triton.jit
def word_to_floats(words, CODE: tl.constexpr, kind: tl.constexpr, HALF: tl.constexpr):
    """The four codes in each of `words` int32, lowest byte first, as four tensors of dtype `kind`, float16 where HALF.

    Two words at a time, a and b, whose codes of equal place become one register:

        a3 a2 a1 a0, b3 b2 b1 b0  ->  b1 a1 b0 a0, b3 a3 b2 a2      then e4m3: a conversion for each half
        int8: 128 more than the code, as the last byte of float16 1024 = 0x6400, is 1152 more than the code
    """
    if HALF and CODE == 2:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .b16 p0, p1, p2, p3;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            mov.b32 {p0, p1}, low;
            mov.b32 {p2, p3}, high;
            cvt.rn.f16x2.e4m3x2 $0, p0;
            cvt.rn.f16x2.e4m3x2 $1, p1;
            cvt.rn.f16x2.e4m3x2 $2, p2;
            cvt.rn.f16x2.e4m3x2 $3, p3;
            }
            """,
            "=r,=r,=r,=r,r,r",
            args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif HALF:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, low, high, p0, p1, p2, p3, much, more;
            mov.b32 much, 0x64646464;
            mov.b32 more, 0x64806480;
            xor.b32 a, $4, 0x80808080;
            xor.b32 b, $5, 0x80808080;
            prmt.b32 low, a, b, 0x5140;
            prmt.b32 high, a, b, 0x7362;
            prmt.b32 p0, low, much, 0x4140;
            prmt.b32 p1, low, much, 0x4342;
            prmt.b32 p2, high, much, 0x4140;
            prmt.b32 p3, high, much, 0x4342;
            sub.rn.f16x2 $0, p0, more;
            sub.rn.f16x2 $1, p1, more;
            sub.rn.f16x2 $2, p2, more;
            sub.rn.f16x2 $3, p3, more;
            }
            """,
            "=r,=r,=r,=r,r,r",
            args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        n0 = _byte(words, 0, CODE, kind)
        n1 = _byte(words, 1, CODE, kind)
        n2 = _byte(words, 2, CODE, kind)
        n3 = _byte(words, 3, CODE, kind)
    return n0, n1, n2, n3


@triton.jit
def float_to_code(value, CODE: tl.constexpr):
    """Codes int8 (of e4m3 the bits) of float32 values that are within the codec's limits; ties go to even."""
    if CODE != 2:
        return ((value + ROUND) - ROUND).to(tl.int8)
    # Normal e4m3 numbers keep three bits of mantissa; below 2^-6 they are multiples of 2^-9.
    bits = value.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = kept.to(tl.float32, bitcast=True)
    small = (value + ROUND_SMALL) - ROUND_SMALL
    rounded = tl.where(tl.abs(value) < 0.015625, small, normal)
    halves = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    sign = tl.where(value.to(tl.int32, bitcast=True) < 0, -128, 0)
    return (((halves >> 7) & 0x7F) | sign).to(tl.int8)

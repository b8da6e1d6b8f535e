"""Codes of compressed KV blocks in registers: the same as `kv_cache/codecs.py` makes and reads, bit for bit.

e4m3 is decoded and rounded by integer arithmetic, so it needs no hardware that knows it:

    e4m3     s eeee mmm                 float16  s 0eeee mmm0000000       value of e4m3 = 2^8 * value of float16
"""

import triton
import triton.language as tl

INT8, E4M3, PLAIN = 1, 2, 3
"""CODE of the kernels; 0: there are no compressed blocks."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away, it rounds a float32 to whole numbers, ties to even."""
ROUND_SMALL = tl.constexpr(24576.0)
"""1.5 * 2^14: the same to multiples of 2^-9, the smallest e4m3."""


@triton.jit
def code_to_float(raw, CODE: tl.constexpr):
    """float32 of codes as they lie in memory: int8, or e4m3's bits as int8; with PLAIN what they are."""
    if CODE == 2:
        wide = (
            raw.to(tl.int16) << 7
        ) & -0x4001  # a sign that was extended has filled the highest exponent bit
        return wide.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return raw.to(tl.float32)


@triton.jit
def float_to_code(value, CODE: tl.constexpr):
    """Codes int8 (of e4m3 the bits) of float32 values that are within the codec's limits; ties go to even."""
    if CODE == 1:
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

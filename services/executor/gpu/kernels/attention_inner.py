"""One turn of attention: BLOCK_N keys are read, weighed, and their values summed.

int8 and e4m3 codes are numbers that float16 holds exactly, and hardware makes of them in one instruction for two; so
products with them are float16's, and scales are applied to their results:

    scores[m, n] = (q[m] . code_k[n]) * scale_k[n] * scale      out[m] += (p[m, n] * scale_v[n]) * code_v[n]
"""

import triton
import triton.language as tl

from services.executor.gpu.kernels.codes import code_to_float, word_to_floats

LOG2E = tl.constexpr(1.4426950408889634)
# Scores of keys that a row does not see. Not -inf: a row that sees none of a part would be inf - inf.
NEVER = tl.constexpr(-1.0e30)
NOTHING = tl.constexpr(-1.0e20)  # below any score, above `NEVER` however it is scaled
QUANTIZED = tl.constexpr(0)
WRITABLE = tl.constexpr(1)
BOTH = tl.constexpr(2)
ALL = tl.constexpr(0)
# Of keys that are not masked for another reason, those before the block of the row's own position.
KEPT = tl.constexpr(1)
OWN = tl.constexpr(2)  # those of that block


@triton.jit
def _lines(block, first_block, at_key, head, KV_HEADS: tl.constexpr, SIZE: tl.constexpr):
    """int32 [BLOCK_N]: which lines of a store, of WIDTH numbers each, the keys are; values are KV_HEADS * SIZE later."""
    return ((block - first_block) * (2 * KV_HEADS) + head) * SIZE + at_key


@triton.jit
def _data(
    store, line, there, SIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D]: the numbers of `store` SIDE lines after each `line`."""
    columns = tl.arange(0, BLOCK_D)
    # A line's number has 32 bits, its address more: a layer's store may hold more numbers than that.
    pointers = store + (line.to(tl.int64) * WIDTH)[:, None] + columns[None, :] + SIDE * WIDTH
    if MASKED and WIDTH == BLOCK_D:
        data = tl.load(pointers, mask=there[:, None], other=0.0)
    elif MASKED:
        data = tl.load(pointers, mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK_D:
        data = tl.load(pointers)
    else:
        data = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return data


@triton.jit
def _factors(
    scales, block, num_writable, head, is_quantized,
    SIDE: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N]: the scales of quantized blocks; elsewhere 1."""
    places = scales + (block - num_writable) * (2 * KV_HEADS) + head + SIDE // SIZE
    if MASKED:
        factor = tl.load(places, mask=is_quantized, other=1.0)
    else:
        factor = tl.load(places)
    return factor


@triton.jit
def _read(
    writable, codes, scales, block, at_key, head, there, num_writable, SIDE: tl.constexpr, quantized_dtype: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    CODE: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys (SIDE 0) or values [BLOCK_N, BLOCK_D], and the factors [BLOCK_N] by which they are too small.

    QUANTIZED: in `quantized_dtype`, unless blocks are kept as they are; otherwise in the model's dtype.
    """
    factor = tl.full(block.shape, 1.0, tl.float32)
    if KIND == WRITABLE:
        line = _lines(block, 0, at_key, head, KV_HEADS, SIZE)
        data = _data(writable, line, there, SIDE, WIDTH, BLOCK_D, MASKED)
    elif KIND == QUANTIZED:
        line = _lines(block, num_writable, at_key, head, KV_HEADS, SIZE)
        data = _data(codes, line, there, SIDE, WIDTH, BLOCK_D, MASKED)
        if CODE != 3:
            data = code_to_float(data, CODE, quantized_dtype)
            factor = _factors(scales, block, num_writable, head, there, SIDE, KV_HEADS, SIZE, MASKED)
    else:
        is_writable = there & (block < num_writable)
        is_quantized = there & (block >= num_writable)
        line = _lines(block, 0, at_key, head, KV_HEADS, SIZE)
        data = _data(writable, line, is_writable, SIDE, WIDTH, BLOCK_D, True)
        line = _lines(block, num_writable, at_key, head, KV_HEADS, SIZE)
        raw = _data(codes, line, is_quantized, SIDE, WIDTH, BLOCK_D, True)
        data = tl.where(is_quantized[:, None], code_to_float(raw, CODE, data.dtype), data)
        if CODE != 3:
            factor = _factors(scales, block, num_writable, head, is_quantized, SIDE, KV_HEADS, SIZE, True)
    return data, factor


@triton.jit
def _product(a, b, sums, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """`sums` + a b, in b's dtype."""
    if WIDE:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(a.to(b.dtype), b, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _weights(
    scores, later, key, there, position, softcap, window, slope, largest, total,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr,
    WHICH: tl.constexpr,
):  # fmt: skip
    """The weights [BLOCK_M, BLOCK_N] of `scores`, which `later` is to be multiplied by to make powers of two of them;
    what sums so far are to be multiplied by, and the largest score and the sum of weights from now on."""
    if CAPPED:
        squashed = tl.exp2(scores * (later * 2.0 / softcap))
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (squashed + 1.0))
        later = 1.0
    if SLOPES:
        distance = (key[None, :] - position[:, None]).to(tl.float32)
        scores = scores * later + (slope * LOG2E)[:, None] * distance
        later = 1.0
    if MASKED:
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
        if WHICH == KEPT:
            seen &= key[None, :] < (position // SIZE * SIZE)[:, None]
        elif WHICH == OWN:
            seen &= key[None, :] >= (position // SIZE * SIZE)[:, None]
        scores = tl.where(seen, scores, NEVER)
    # A product by one number waits until the largest is known: in the subtraction of that it costs nothing.
    higher = tl.maximum(largest, tl.max(scores, 1) * later)
    base = higher
    if MASKED:
        # A row that has seen no key yet: its weights are to become 0 as others' do, not 1.
        base = tl.where(higher < NOTHING, 0.0, higher)
    p = tl.exp2(scores * later - base[:, None])
    keep = tl.exp2(largest - higher)
    return p, keep, higher, total * keep + tl.sum(p, 1)


@triton.jit
def turn(
    q, q_unit, writable, codes, scales, block, start, end, head, position, scale, softcap, window, slope, num_writable,
    largest, total, sums, unit,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODE: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """BLOCK_N keys from `start` on. `q` is what was asked over `q_unit`; `sums` times `unit` is what it says."""
    key = start + tl.arange(0, BLOCK_N)
    at_key = key % SIZE
    there = key < end
    k, factor = _read(
        writable, codes, scales, block, at_key, head, there, num_writable, 0, q.dtype,
        KV_HEADS, SIZE, WIDTH, BLOCK_D, CODE, KIND, MASKED,
    )  # fmt: skip
    scores = _product(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, WIDE)
    later = scale * LOG2E
    if CODE != 0 and KIND != WRITABLE:
        if KIND == QUANTIZED:
            later = later * q_unit
        scores = scores * (factor * later)[None, :]
        later = 1.0
    p, keep, largest, total = _weights(
        scores, later, key, there, position, softcap, window, slope, largest, total, SIZE, CAPPED, WINDOWED, SLOPES,
        MASKED, WHICH,
    )  # fmt: skip
    v, factor = _read(
        writable, codes, scales, block, at_key, head, there, num_writable, KV_HEADS * SIZE, q.dtype,
        KV_HEADS, SIZE, WIDTH, BLOCK_D, CODE, KIND, MASKED,
    )  # fmt: skip
    if CODE != 0 and KIND == BOTH:
        p = p * factor[None, :]
    if KIND == QUANTIZED and CODE != 3:
        p, keep, unit = _in_units(p, keep, factor, unit)
    return largest, total, _product(p, v, sums * keep[:, None], PRECISION, WIDE), unit


@triton.jit
def _in_units(p, keep, factor, unit):
    """Weights times the values' scales, in units of the largest scale so far: float16 has no room for them as they are."""
    larger = tl.maximum(unit, tl.max(factor, 0))
    return p * (factor / larger)[None, :], keep * (unit / larger), larger


@triton.jit
def quantized_turn(
    q0, q1, q2, q3, q_unit, words, scales, block, start, end, head, position, scale, softcap, window, slope, num_writable,
    largest, total, sums0, sums1, sums2, sums3, unit,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CODE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SLOPES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """As `turn` over quantized blocks whose codes are read as words of four, for decodes.

    Matrix instructions want values of two keys in one register, and codes lie with one key's side by side. Word by
    word they come from shared memory without conflicts, and four products, of every fourth column each, take them
    apart in registers: a byte at a time would be four times the instructions.
    """
    key = start + tl.arange(0, BLOCK_N)
    there = key < end
    line = _lines(block, num_writable, key % SIZE, head, KV_HEADS, SIZE)
    k0, k1, k2, k3 = word_to_floats(
        _data(words, line, there, 0, WIDTH // 4, WIDTH // 4, WINDOWED), CODE, q0.dtype, HALF
    )
    scores = _product(q0, tl.trans(k0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, WIDE)
    scores = _product(q1, tl.trans(k1), scores, PRECISION, WIDE)
    scores = _product(q2, tl.trans(k2), scores, PRECISION, WIDE)
    scores = _product(q3, tl.trans(k3), scores, PRECISION, WIDE)
    factor = _factors(scales, block, num_writable, head, there, 0, KV_HEADS, SIZE, WINDOWED)
    scores = scores * (factor * (scale * LOG2E * q_unit))[None, :]
    p, keep, largest, total = _weights(
        scores, 1.0, key, there, position, softcap, window, slope, largest, total, SIZE, CAPPED, WINDOWED, SLOPES,
        WINDOWED, ALL,
    )  # fmt: skip
    factor = _factors(scales, block, num_writable, head, there, KV_HEADS * SIZE, KV_HEADS, SIZE, WINDOWED)
    p, keep, unit = _in_units(p, keep, factor, unit)
    v0, v1, v2, v3 = word_to_floats(
        _data(words, line, there, KV_HEADS * SIZE, WIDTH // 4, WIDTH // 4, WINDOWED), CODE, q0.dtype, HALF
    )
    sums0 = _product(p, v0, sums0 * keep[:, None], PRECISION, WIDE)
    sums1 = _product(p, v1, sums1 * keep[:, None], PRECISION, WIDE)
    sums2 = _product(p, v2, sums2 * keep[:, None], PRECISION, WIDE)
    sums3 = _product(p, v3, sums3 * keep[:, None], PRECISION, WIDE)
    return largest, total, sums0, sums1, sums2, sums3, unit

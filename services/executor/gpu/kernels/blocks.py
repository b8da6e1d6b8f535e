"""Keys and values into writable blocks, and full writable blocks into codes and scales."""

import triton
import triton.language as tl

from services.executor.gpu.kernels.codes import float_to_code


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write(
    key, value, slots, writable, key_stride, value_stride,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T,): row t of `key` and `value` [T, KV_HEADS, WIDTH] to the slot `slots[t]` of `writable`
    [blocks, 2, KV_HEADS, SIZE, WIDTH]; below 0: nowhere, as rows that only fill up a graph's batch have it.
    BLOCK: KV_HEADS * WIDTH, up to a power of two; strides: of rows, in numbers."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        block, place = slot // SIZE, slot % SIZE
        at = tl.arange(0, BLOCK)
        head, column = at // WIDTH, at % WIDTH
        inside = at < KV_HEADS * WIDTH
        target = ((block * 2 * KV_HEADS + head) * SIZE + place) * WIDTH + column
        k = tl.load(key + row.to(tl.int64) * key_stride + at, mask=inside)
        v = tl.load(value + row.to(tl.int64) * value_stride + at, mask=inside)
        tl.store(writable + target, k, mask=inside)
        tl.store(writable + target + KV_HEADS * SIZE * WIDTH, v, mask=inside)


@triton.jit(
    do_not_specialize=["writable_layer_stride", "code_layer_stride", "scale_layer_stride"],
    do_not_specialize_on_alignment=["pairs", "layers"],
)
def compress(
    writable, codes, scales, pairs, layers, writable_layer_stride, code_layer_stride, scale_layer_stride, limit, smallest,
    ROWS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Grid (pairs, layers, ROWS): one head's keys or values of a block, COUNT numbers, as codes and a scale.

    `pairs` int64 [C, 2]: writable block, place among the quantized ones; below 0: none. `layers` int64: the layer of `writable` for each of `codes`
    and `scales`. BLOCK: COUNT, up to a power of two. What `Codec.encode` says, to the bit; PLAIN: copies.
    """
    pair, layer, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    source, target = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    if source < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < COUNT
    begin = tl.load(layers + layer) * writable_layer_stride + (source * ROWS + part) * COUNT
    row = target * ROWS + part
    place = codes + layer * code_layer_stride + row * COUNT + at
    raw = tl.load(writable + begin + at, mask=inside, other=0.0)
    if CODE == 3:
        tl.store(place, raw, mask=inside)
    else:
        values = raw.to(tl.float32)
        extreme = tl.max(tl.abs(values), 0)
        # NaN compares with nothing: a row that holds one gets it for its scale, and hides nothing.
        strange = tl.sum(tl.where(values != values, 1, 0), 0) > 0
        # Divided as IEEE 754 rounds: the plain operator may be off by two units on a GPU.
        scale = tl.where(strange, float("nan"), tl.maximum(tl.div_rn(extreme, limit), smallest))
        scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale + tl.zeros_like(values)), -limit), limit)
        tl.store(place, float_to_code(scaled, CODE), mask=inside)
        tl.store(scales + layer * scale_layer_stride + row, scale)

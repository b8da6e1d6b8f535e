"""RMS norm of rows, with what stands before it in a decoder: a norm of its own, a factor, the residual's sum.

Computed in float32 and rounded where transformers rounds, so that the residual has its very bits:

    added      x, through the norm behind attention or feed-forward (Gemma 2, 3), times the residual scale (Granite)
    residual   += added
    out        norm of the residual

Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(value, weight, eps, width, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """`value` float32 [BLOCK], zero beyond `width`, rounded to `dtype`, as float32."""
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    if not OFFSET:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype).to(tl.float32)


@triton.jit
def add_norm(
    x, residual, after, weight, out, scale, eps, width,
    BLOCK: tl.constexpr, ADD: tl.constexpr, AFTER: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). `x`, `residual`, `out` [rows, width] contiguous; `after`, `weight` float32 [width].

    ADD: adds to `residual` in place; without it `out` is the norm of `x`. AFTER: `x` is normed by `after` first;
    SCALED: multiplied by `scale`. OFFSET: Gemma's norms, which round once. BLOCK: `width`, up to a power of two.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = tl.program_id(0).to(tl.int64) * width + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if AFTER:
        behind = tl.load(after + at, mask=inside, other=0.0)
        value = _normed(value, behind, eps, width, dtype, OFFSET)
    if SCALED:
        value = (value * scale).to(dtype).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(dtype)
        tl.store(residual + place, kept, mask=inside)
        value = kept.to(tl.float32)
    normed = _normed(value, tl.load(weight + at, mask=inside, other=0.0), eps, width, dtype, OFFSET)
    tl.store(out + place, normed.to(dtype), mask=inside)

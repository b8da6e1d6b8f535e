"""What lies between a layer's matrix products, one pass over memory each.

`gated`: the activation of a gated feed-forward: act(gate) * up, in float32, rounded once. Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.

`add_norm`: RMS norm of rows, with what stands before it in a decoder: a norm of its own, a factor, the residual's sum.

Computed in float32 and rounded where transformers rounds, so that the residual has its very bits:

    added      x, through the norm behind attention or feed-forward (Gemma 2, 3), times the residual scale (Granite)
    residual   += added
    out        norm of the residual

Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.

`place`: queries, keys and values from their product to where attention reads them, in one pass.

    qkv      [T, q heads | kv heads (keys) | kv heads (values), d]
    query    [T, q heads, d]     normed within each head where the model does, turned by its position
    blocks   keys, so too, and values as they are, at the token's slot

A head's first 2 * HALF values are turned, i with i + HALF; what is behind them stays. Computed in float32 and rounded
once, but for the norms' own rounding. Source: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864.
"""

import triton
import triton.language as tl


@triton.jit
def gated(x, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Grid (rows, width / BLOCK, rounded up): `x` [rows, 2 * width], gate and up, to `out` [rows, width], contiguous.

    SiLU, or with GELU the approximation of GELU by tanh: of y = sqrt(2 / pi) * (g + 0.044715 g^3), 0.5 * (1 + tanh y)
    is the logistic function of 2 y.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * (2 * width) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * width) + width + at, mask=inside, other=0.0).to(tl.float32)
    power = gate
    if GELU:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    acted = gate / (1.0 + tl.exp(tl.minimum(-power, 80.0)))  # beyond, exp would overflow, and nothing is left
    tl.store(out + row * width + at, (acted * up).to(out.dtype.element_ty), mask=inside)


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


@triton.jit
def _weight(query_norm, key_norm, is_query, column, WIDTH: tl.constexpr):
    """Of the norm that each head has, at `column`."""
    of_query = tl.load(query_norm + column, mask=column < WIDTH, other=0.0)
    of_key = tl.load(key_norm + column, mask=column < WIDTH, other=0.0)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _weighted(scaled, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """`scaled` float32, whose mean square is 1, times `weight`, rounded to `dtype`, as float32."""
    if not OFFSET:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a view of a larger buffer
def place(
    qkv, cosines, sines, slots, query_norm, key_norm, query, hot, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORMS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads of all three kinds / BLOCK_H, rounded up).

    `cosines`, `sines` float32 [T, HALF], scaled; HALF 0: nothing is turned. `slots` integers [T]: block * SIZE + place
    in it; negative: the token's key and value go nowhere. `query_norm`, `key_norm` float32 [WIDTH], read with NORMS;
    OFFSET: Gemma's, which round once. `hot` [blocks, 2, KV_HEADS, SIZE, WIDTH]. BLOCK_D: WIDTH, up to a power of two.
    """
    heads: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (column < WIDTH)
    row = qkv + token * (heads * WIDTH) + head * WIDTH
    raw = tl.load(row + column, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    is_query = head < Q_HEADS

    if NORMS:
        factor = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        weight = _weight(query_norm, key_norm, is_query, column, WIDTH)
        value = _weighted(value * factor, weight, dtype, OFFSET)
    if HALF > 0:
        # The other half is read a second time, from a cache: no exchange between threads.
        other = tl.where(column < HALF, column + HALF, column - HALF)
        turns = inside & (column < 2 * HALF)
        partner = tl.load(row + other, mask=turns, other=0.0).to(tl.float32)
        if NORMS:
            weight = _weight(query_norm, key_norm, is_query, other, WIDTH)
            partner = _weighted(partner * factor, weight, dtype, OFFSET)
        angle = token * HALF + tl.where(column < HALF, column, other)
        turned = column < 2 * HALF
        cosine = tl.load(cosines + angle, mask=turned, other=1.0)
        sine = tl.load(sines + angle, mask=turned, other=0.0)
        value = value * cosine + partner * tl.where(column < HALF, -sine, sine)

    # A value is neither normed nor turned.
    result = tl.where(head < Q_HEADS + KV_HEADS, value.to(dtype), raw)
    tl.store(query + token * (Q_HEADS * WIDTH) + head * WIDTH + column, result, mask=inside & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    target = slot // SIZE * (2 * KV_HEADS) + (head - Q_HEADS)
    target = (target * SIZE + slot % SIZE) * WIDTH + column
    end = tl.where(slot >= 0, heads, 0)
    tl.store(hot + target, result, mask=inside & (head >= Q_HEADS) & (head < end))

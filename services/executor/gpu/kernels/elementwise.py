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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gated_kernel(x, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
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
def add_norm_kernel(
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
def place_kernel(
    qkv, cosines, sines, slots, query_norm, key_norm, query, writable, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORMS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads of all three kinds / BLOCK_H, rounded up).

    `cosines`, `sines` float32 [T, HALF], scaled; HALF 0: nothing is turned. `slots` integers [T]: block * SIZE + place
    in it; negative: the token's key and value go nowhere. `query_norm`, `key_norm` float32 [WIDTH], read with NORMS;
    OFFSET: Gemma's, which round once. `writable` [blocks, 2, KV_HEADS, SIZE, WIDTH]. BLOCK_D: WIDTH, up to a power of two.
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
    tl.store(writable + target, result, mask=inside & (head >= Q_HEADS) & (head < end))


VALUES = 1024  # of one program, where it can choose: 16 bytes of bf16 for each thread of four warps
_WARP_VALUES = 256  # of a row that a program holds whole, per warp: as many bytes a thread


class Norms(NamedTuple):
    """How a model's norms compute."""

    eps: float
    offset: bool  # Gemma's: values are multiplied by the weights before they are rounded


class Rotation(NamedTuple):
    """Of each token of a step: float32 [T, rotary dim / 2], scaled."""

    cosines: Tensor
    sines: Tensor


def norm(x: Tensor, weight: Tensor, how: Norms) -> Tensor:
    """RMS norm of `x` [T, width], contiguous; `weight` float32 [width]."""
    return add_norm(x, None, weight, how)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, how: Norms, after: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Adds `x` [T, width] to `residual` in place, and returns the norm of the sum by `weight` float32 [width]; without
    `residual` that of `x`.

    What is added is normed by `after` float32 [width] where there is one, and then multiplied by `scale`.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight if after is None else after, weight, out, scale, how.eps, width,
        BLOCK=block, ADD=residual is not None, AFTER=after is not None, SCALED=scale != 1.0, OFFSET=how.offset,
        num_warps=min(max(block // _WARP_VALUES, 1), 32),
    )  # fmt: skip
    return out


def place(
    qkv: Tensor,
    q_heads: int,
    rotation: Rotation | None,
    slots: Tensor,
    writable: Tensor,
    head_norms: tuple[Tensor, Tensor] | None,
    how: Norms,
) -> Tensor:
    """Queries [T, q heads, d] of `qkv` [T, (q heads + 2 * kv heads) * d]; keys and values go to `slots` [T] of `writable`
    [blocks, 2, kv heads, size, d], those of a negative slot nowhere. Queries and keys are normed by `head_norms`
    float32 [d] each, and turned by `rotation`."""
    tokens = len(qkv)
    kv_heads, size, width = writable.shape[2:]
    query = torch.empty((tokens, q_heads, width), dtype=qkv.dtype, device=qkv.device)
    block_d = triton.next_power_of_2(width)
    block_h = max(VALUES // block_d, 1)
    place_kernel[(tokens, triton.cdiv(q_heads + 2 * kv_heads, block_h))](
        qkv, qkv if rotation is None else rotation.cosines, qkv if rotation is None else rotation.sines, slots,
        qkv if head_norms is None else head_norms[0], qkv if head_norms is None else head_norms[1],
        query, writable, how.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, SIZE=size, WIDTH=width,
        HALF=0 if rotation is None else rotation.cosines.shape[1], BLOCK_H=block_h, BLOCK_D=block_d,
        NORMS=head_norms is not None, OFFSET=how.offset,
    )  # fmt: skip
    return query


def gated(x: Tensor, *, gelu: bool) -> Tensor:
    """act(gate) * up [T, inner] of `x` [T, 2 * inner], gate first; SiLU, or GELU by tanh."""
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    gated_kernel[(rows, triton.cdiv(width, VALUES))](x, out, width, BLOCK=VALUES, GELU=gelu)
    return out

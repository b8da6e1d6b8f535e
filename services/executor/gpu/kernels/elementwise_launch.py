"""What lies between a layer's matrix products, as functions of tensors: one pass over memory each."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.gpu.kernels import elementwise

VALUES = 1024
"""Of one program, where it can choose: 16 bytes of bf16 for each thread of four warps."""
_WARP_VALUES = 256
"""Of a row that a program holds whole, per warp: as many bytes a thread."""


class Norms(NamedTuple):
    """How a model's norms compute."""

    eps: float
    offset: bool
    """Gemma's: values are multiplied by the weights before they are rounded."""


class Rotation(NamedTuple):
    """Of each token of a step: float32 [T, rotary dim / 2], scaled."""

    cosines: Tensor
    sines: Tensor


def norm(x: Tensor, weight: Tensor, how: Norms) -> Tensor:
    """RMS norm of `x` [T, width], contiguous; `weight` float32 [width]."""
    return _norm(x, None, None, weight, 1.0, how)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, how: Norms, after: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Adds `x` [T, width] to `residual` in place, and returns the norm of the sum by `weight` float32 [width].

    What is added is normed by `after` float32 [width] where there is one, and then multiplied by `scale`.
    """
    return _norm(x, residual, after, weight, scale, how)


def norm_warps(block: int) -> int:
    """Of the program that holds a row of `block` values."""
    return min(max(block // _WARP_VALUES, 1), 32)


def _norm(
    x: Tensor, residual: Tensor | None, after: Tensor | None, weight: Tensor, scale: float, how: Norms
) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    elementwise.add_norm[(rows,)](
        x, x if residual is None else residual, weight if after is None else after, weight, out, scale, how.eps, width,
        BLOCK=block, ADD=residual is not None, AFTER=after is not None, SCALED=scale != 1.0, OFFSET=how.offset,
        num_warps=norm_warps(block),
    )  # fmt: skip
    return out


def place(
    qkv: Tensor,
    q_heads: int,
    rotation: Rotation | None,
    slots: Tensor,
    hot: Tensor,
    head_norms: tuple[Tensor, Tensor] | None,
    how: Norms,
) -> Tensor:
    """Queries [T, q heads, d] of `qkv` [T, (q heads + 2 * kv heads) * d]; keys and values go to `slots` [T] of `hot`
    [blocks, 2, kv heads, size, d], those of a negative slot nowhere. Queries and keys are normed by `head_norms`
    float32 [d] each, and turned by `rotation`."""
    tokens = len(qkv)
    kv_heads, size, width = hot.shape[2:]
    query = torch.empty((tokens, q_heads, width), dtype=qkv.dtype, device=qkv.device)
    block_d = triton.next_power_of_2(width)
    block_h = max(VALUES // block_d, 1)
    elementwise.place[(tokens, triton.cdiv(q_heads + 2 * kv_heads, block_h))](
        qkv, qkv if rotation is None else rotation.cosines, qkv if rotation is None else rotation.sines, slots,
        qkv if head_norms is None else head_norms[0], qkv if head_norms is None else head_norms[1],
        query, hot, how.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, SIZE=size, WIDTH=width,
        HALF=0 if rotation is None else rotation.cosines.shape[1], BLOCK_H=block_h, BLOCK_D=block_d,
        NORMS=head_norms is not None, OFFSET=how.offset,
    )  # fmt: skip
    return query


def gated(x: Tensor, *, gelu: bool) -> Tensor:
    """act(gate) * up [T, inner] of `x` [T, 2 * inner], gate first; SiLU, or GELU by tanh."""
    rows, width = len(x), x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    elementwise.gated[(rows, triton.cdiv(width, VALUES))](x, out, width, BLOCK=VALUES, GELU=gelu)
    return out

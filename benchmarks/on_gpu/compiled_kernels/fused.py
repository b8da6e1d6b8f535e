"""The kernels between a decoder's products: norms, places, activations."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.on_gpu.compiled_kernels.launched import Compiled, compile_work, meta
from services.executor.gpu.kernels import elementwise

TOKENS = 64
PLAIN, GEMMA = elementwise.Norms(1e-6, offset=False), elementwise.Norms(1e-6, offset=True)
FP32 = torch.float32


def norm(width: int, how: elementwise.Norms) -> None:
    elementwise.norm(meta(TOKENS, width), meta(width, dtype=FP32), how)


def add_norm(
    width: int, how: elementwise.Norms, after: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Launches one; `after`: with the norm behind attention, and a scale."""
    x, residual = meta(TOKENS, width, dtype=dtype), meta(TOKENS, width, dtype=dtype)
    weight = meta(width, dtype=FP32)
    elementwise.add_norm(x, residual, weight, how, weight if after else None, 0.5 if after else 1.0)


def place(
    q_heads: int,
    kv_heads: int,
    width: int,
    half: int,
    normed: bool,
    dtype: torch.dtype = torch.bfloat16,
    slots: torch.dtype = torch.int32,
) -> None:
    angles = meta(TOKENS, half, dtype=FP32)
    norms = (meta(width, dtype=FP32), meta(width, dtype=FP32))
    elementwise.place(
        meta(TOKENS, (q_heads + 2 * kv_heads) * width, dtype=dtype),
        q_heads,
        elementwise.Rotation(angles, angles) if half else None,
        meta(TOKENS, dtype=slots),
        meta(1000, 2, kv_heads, 16, width, dtype=dtype),
        norms if normed else None,
        PLAIN,
    )


def gated(width: int, gelu: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    elementwise.gated(meta(TOKENS, 2 * width, dtype=dtype), gelu=gelu)


def fused_kernels() -> Iterator[Compiled]:
    found = {
        "norm, 4096": partial(norm, 4096, PLAIN),
        "add and norm, 4096": partial(add_norm, 4096, PLAIN),
        "add and norm, 5120": partial(add_norm, 5120, PLAIN),
        "add and norm, 4096, fp32": partial(add_norm, 4096, PLAIN, dtype=FP32),
        "norm, add and norm, 8192": partial(add_norm, 8192, GEMMA, after=True),
        "norm, add and norm, 16384": partial(add_norm, 16384, GEMMA, after=True),
        "place, 32 and 8 heads": partial(place, 32, 8, 128, 64, normed=False),
        "place, int64 slots": partial(place, 32, 8, 128, 64, normed=False, slots=torch.int64),
        "place, norms": partial(place, 32, 8, 128, 64, normed=True),
        "place, norms, fp32": partial(place, 32, 8, 128, 64, normed=True, dtype=FP32),
        "place, heads of 256, norms": partial(place, 8, 4, 256, 128, normed=True),
        "place, heads of 96": partial(place, 32, 32, 96, 48, normed=False),
        "place, not turned": partial(place, 16, 4, 128, 0, normed=False),
        "silu": partial(gated, 14336, gelu=False),
        "silu, fp32": partial(gated, 14336, gelu=False, dtype=FP32),
        "gelu": partial(gated, 14336, gelu=True),
    }
    for name, work in found.items():
        yield from compile_work(name, work)

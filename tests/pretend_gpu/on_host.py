"""What of a GPU's functions the host's torch does otherwise, or not at all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _histc(numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(numbers.float(), *args, **kwargs).to(numbers.dtype)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Scaled by rows, with what cuBLAS asks for (`_scaled_mm` in aten/src/ATen/native/cuda)."""
    rows, inner, outputs = *a.shape, b.shape[1]
    asked = {
        "e4m3": a.dtype == b.dtype == torch.float8_e4m3fn,
        "a row-major, b column-major": a.stride() == (inner, 1) and b.stride() == (1, inner),
        "sizes of b that 16 divides": not inner % 16 and not outputs % 16,
        "float32 scales": scale_a.dtype == scale_b.dtype == torch.float32,
        "scales by rows": scale_a.shape == (rows, 1) and scale_b.shape == (1, outputs),
        "contiguous scales": scale_a.is_contiguous() and scale_b.is_contiguous(),
        "bf16": out_dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16),
    }
    if missing := [name for name, there in asked.items() if not there]:
        raise RuntimeError(f"_scaled_mm asks for {', '.join(missing)}")
    product = (a.float() * scale_a) @ (b.float() * scale_b)
    return (product if bias is None else product + bias.float()).to(out_dtype)


ON_HOST: dict[str, Callable[..., Any]] = {"histc": _histc, "_scaled_mm": _scaled_mm}

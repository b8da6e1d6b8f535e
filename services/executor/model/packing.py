"""Weights in the order in which the CPU's matrix kernels read them.

oneDNN re-orders a plain bf16 weight on every product, which costs as much as the product itself when
only a few rows are multiplied. Packed once at load, one row runs at the speed of memory. The two
operators are those that torch's own compiler emits for frozen linears.
"""

import torch
from torch import Tensor


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` on `device` gain by packing, and this torch knows how to."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def packed_weight(weight: Tensor) -> Tensor:
    """`weight` [out, in], bf16, as an opaque tensor for `packed_product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001  # no public name
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., in] times the packed weight, plus `bias` [out]: [..., out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return product

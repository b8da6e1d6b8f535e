"""Matrix products of models that PyTorch runs, by weights that are plain tensors or codes (`weight_formats.py`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from services.executor.model.parallel.layers import LinearShard, unpack_experts
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.weight_formats import Weight

# [T, in] in the model's dtype times a weight, plus its bias where there is one: [T, out], the same dtype.
Product = Callable[[Tensor], Tensor]
# What `make_product` is: whoever builds layers may be given another.
MakeProduct = Callable[[Weight, Tensor | None], Product]


def make_product(weight: Weight, bias: Tensor | None) -> Product:
    """`weight` [out, in] and `bias` [out], on the device they are used on. One of codes is unpacked for every
    product."""
    if isinstance(weight, Tensor):
        return partial(functional.linear, weight=weight, bias=bias)
    if isinstance(weight, DeferredRows):
        weight = weight.read()
    assert isinstance(weight, QuantizedRows), "others are of one backend, which multiplies by them"
    rows = weight
    return lambda x: functional.linear(x, rows.dequantized().to(x), bias)


def use_products(model: Any, make: MakeProduct = make_product) -> None:
    """Has the quantised linears of `model`, which PyTorch runs, multiply by `make`'s products. Of its own experts there
    is no such product: they are unpacked."""
    unpack_experts(model)
    for module in model.modules():
        if isinstance(module, LinearShard) and not isinstance(module.stored, Tensor):
            module.multiply_by(make(module.stored, module.bias))

"""Matrix products of a decoder's layers.

What a product multiplies by says how: a plain weight by the library's product, a quantised one by one of `coded.py`.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from services.executor.model.layers import LinearShard
from services.executor.model.quantized import Quantized, Weight


class Product(Protocol):
    """`x` [T, in] in the model's dtype times a weight, plus its bias where there is one: [T, out], the same dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


MakeProduct = Callable[[Weight, Tensor | None], Product]
"""What `make_product` is: whoever builds layers may be given another."""


class PlainProduct:
    """With the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


def make_product(weight: Weight, bias: Tensor | None) -> Product:
    """`weight` [out, in] and `bias` [out], on the device they are used on."""
    if isinstance(weight, Tensor):
        return PlainProduct(weight, bias)
    from services.executor.gpu.coded import coded_product  # with Triton, which not every host has

    return coded_product(weight, bias)


def invariant_product(weight: Weight, bias: Tensor | None) -> Product:
    """One whose every row has the same bits whatever the others are: its tiles depend on the weight alone."""
    from services.executor.gpu.coded import InvariantProduct  # with Triton, which not every host has

    return InvariantProduct(weight, bias)


def use_products(model: Any, make: MakeProduct = make_product) -> None:
    """Has the quantised linear layers of `model`, which PyTorch runs, multiply by `make`'s products."""
    for module in model.modules():
        if isinstance(module, LinearShard) and isinstance(module.stored, Quantized):
            module.multiply_by(make(module.stored, module.bias))

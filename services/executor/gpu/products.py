"""Matrix products of a decoder's layers."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Product(Protocol):
    """`x` [T, in] in the model's dtype times a weight, plus its bias where there is one: [T, out], the same dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainProduct:
    """With the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


def make_product(weight: Tensor, bias: Tensor | None) -> Product:
    """`weight` [out, in] and `bias` [out], on the device they are used on."""
    return PlainProduct(weight, bias)

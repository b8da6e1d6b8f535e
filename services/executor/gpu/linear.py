"""Matrix products of a decoder's layers, and whether weights can be kept as `--weight-dtype` says.

What a product multiplies by says how: a plain weight by the library's product, a quantised one by one of
`quantized_matmul.py`.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.executor.core.settings import WeightDType
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.parallel.layers import LinearShard
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Weight, WeightCodec
from shared.errors import ConfigurationError

Product = Callable[[Tensor], Tensor]
"""[T, in] in the model's dtype times a weight, plus its bias where there is one: [T, out], the same dtype."""
MakeProduct = Callable[[Weight, Tensor | None], Product]
"""What `make_product` is: whoever builds layers may be given another."""


class UnpackedProduct:
    """With a weight that is unpacked for every product."""

    def __init__(self, weight: QuantizedRows, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight.dequantized().to(x), self._bias)


class PlainProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


def make_product(weight: Weight, bias: Tensor | None) -> Product:
    """`weight` [out, in] and `bias` [out], on the device they are used on."""
    if isinstance(weight, Tensor):
        return PlainProduct(weight, bias)
    if isinstance(weight, DeferredRows):
        weight = weight.read()
    if isinstance(weight, QuantizedRows):
        return UnpackedProduct(weight, bias)
    from services.executor.gpu.quantized_matmul import coded_product  # with Triton, which not every host has

    return coded_product(weight, bias)


def invariant_product(weight: Weight, bias: Tensor | None) -> Product:
    """One whose every row has the same bits whatever the others are: its tiles depend on the weight alone."""
    from services.executor.gpu.quantized_matmul import (
        InvariantProduct,  # with Triton, which not every host has
    )

    return InvariantProduct(weight, bias)


def use_products(model: Any, make: MakeProduct = make_product) -> None:
    """Has the quantised linear layers of `model`, which PyTorch runs, multiply by `make`'s products."""
    for module in model.modules():
        if isinstance(module, LinearShard) and not isinstance(module.stored, Tensor):
            module.multiply_by(make(module.stored, module.bias))


_CODECS: dict[str, Codec] = {"fp8": FP8, "int8": INT8}
_FIRST_WITH_FP8 = (8, 9)
"""Compute capability of the first processors that multiply e4m3 (Ada)."""


def weight_codec(kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
    """How the weights of linear layers are kept; None: as they are computed with, which is `dtype`.

    Raises `ConfigurationError` where `device` cannot multiply by such weights.
    """
    if kind in ("auto", "bf16"):
        return None
    on_gpu = device.type == "cuda"
    served: Mapping[str, WeightCodec] = _CODECS if on_gpu else CODECS
    if kind not in served:
        raise ConfigurationError(
            f"--weight-dtype {kind} is for {'CPUs' if on_gpu else 'GPUs'} and this rank computes on the "
            f"{'GPU' if on_gpu else 'CPU'}; leave it at auto, or choose one of: {', '.join(served)}."
        )
    codec = served[kind]
    if not on_gpu:
        return codec
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"--weight-dtype {kind} computes in bf16 and this model would be served in fp32; give --dtype bf16, "
            "or leave --weight-dtype at auto."
        )
    capability = torch.cuda.get_device_capability(device)
    if codec is FP8 and capability < _FIRST_WITH_FP8:
        raise ConfigurationError(
            f"--weight-dtype fp8 needs a GPU that multiplies fp8 (compute capability 8.9: Ada, Hopper or newer) and "
            f"this one has {capability[0]}.{capability[1]}; use --weight-dtype int8, or leave it at auto."
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError(
            f"--weight-dtype {kind} needs Triton, which is not installed; install the triton that belongs to this "
            "torch, or leave --weight-dtype at auto."
        )
    return codec

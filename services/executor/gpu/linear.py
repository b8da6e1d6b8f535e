"""Matrix products of a decoder's layers, and whether weights can be kept as `--weight-dtype` says.

What a product multiplies by says how: a plain weight by the library's product, a quantised one by one of
`quantized_matmul.py`.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from services.executor.kv_cache.codecs import COMPRESSING
from services.executor.model import products
from services.executor.model.lowering import Weights
from services.executor.model.parallel.layers import (
    EXPERT_WEIGHTS,
    VocabParallelEmbedding,
    WeightShard,
    expert_weight_of,
    holds_experts,
    keep_quantized_experts,
)
from services.executor.model.products import MakeProduct, Product
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import codec_of
from services.executor.model.weight_formats import Quantized, Weight, WeightCodec, joined
from shared.data_types import WeightDType
from shared.errors import ConfigurationError

if TYPE_CHECKING:  # it imports Triton, which not every host has
    from services.executor.gpu.kernels.grouped import PackedRows


def make_product(weight: Weight, bias: Tensor | None) -> Product:
    """`weight` [out, in] and `bias` [out], on the device they are used on."""
    of_bf16 = isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if isinstance(weight, Tensor | QuantizedRows | DeferredRows) and not of_bf16:
        return products.make_product(weight, bias)
    from services.executor.gpu import quantized_matmul  # with Triton, which not every host has

    if isinstance(weight, Tensor):
        return quantized_matmul.PlainProduct(weight, bias)
    if isinstance(weight, Quantized):
        return quantized_matmul.coded_product(weight, bias)
    return quantized_matmul.GroupedProduct(cast("PackedRows", weight), bias)


def invariant_product(weight: Weight, bias: Tensor | None) -> Product:
    """One whose every row has the same bits whatever the others are: its tiles depend on the weight alone."""
    from services.executor.gpu import quantized_matmul

    if isinstance(weight, Tensor | Quantized):
        return quantized_matmul.InvariantProduct(weight, bias)
    return quantized_matmul.GroupedProduct(cast("PackedRows", weight), bias, invariant=True)


def make_joined(linears: Sequence[Weights], make: MakeProduct) -> Product:
    """Linears of the same inputs as one; those of one format by one product."""
    products = [make(*linear) for linear in _joined(linears)]
    return products[0] if len(products) == 1 else lambda x: torch.cat([product(x) for product in products], dim=1)


def _joined(linears: Sequence[Weights]) -> list[Weights]:
    """Neighbours of one format as one, which is a copy."""
    runs: list[list[Weights]] = []
    for linear in linears:
        if runs and _can_follow(runs[-1][-1][0], linear[0]):
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _can_follow(weight: Weight, other: Weight) -> bool:
    if isinstance(weight, Tensor | Quantized):
        return isinstance(other, Tensor if isinstance(weight, Tensor) else Quantized)
    from services.executor.gpu.kernels.grouped import PackedRows

    return isinstance(weight, PackedRows) and isinstance(other, PackedRows) and weight.can_precede(other)


def _as_one(linears: Sequence[Weights]) -> Weights:
    biases = [bias for _, bias in linears if bias is not None]
    assert len(biases) in (0, len(linears)), "of linears that are one, some have a bias and some have none"
    weights = [weight for weight, _ in linears]
    bias = torch.cat(biases) if biases else None
    if isinstance(weights[0], Tensor | Quantized):
        return joined(weights), bias
    return type(cast("PackedRows", weights[0])).joined(cast("list[PackedRows]", weights)), bias


def make_lookup(weight: Weight, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Integers [T] -> those rows of `weight` [T, in], in `dtype`, in memory of their own."""
    if isinstance(weight, Tensor):
        return lambda rows: functional.embedding(rows, weight)
    from services.executor.gpu.quantized_matmul import PackedLookup

    return PackedLookup(cast("PackedRows", weight), dtype)


def pack_for_gpu(model: Any, device: torch.device) -> None:
    """Has the weights of `model` that are codes with scales for groups lie on `device` as the GPU's kernels read them,
    one after the other; tied ones once. What is packed already stays so."""
    holders: dict[int, list[WeightShard]] = {}
    for module in model.modules():
        if isinstance(module, WeightShard) and isinstance(module.stored, QuantizedRows | DeferredRows):
            holders.setdefault(id(module.stored), []).append(module)
    for modules in holders.values():
        from services.executor.gpu.quantized_matmul import packed_rows  # with Triton

        stored = modules[0].stored
        rows = stored.read() if isinstance(stored, DeferredRows) else stored
        assert isinstance(rows, QuantizedRows), "others are not packed"
        packed = packed_rows(rows.to(device))
        for module in modules:
            module.keep_quantized(packed)
    _pack_experts(model, device)


def _pack_experts(model: Any, device: torch.device) -> None:
    """The same for experts, all of a layer as one."""
    for module in model.modules():
        for name in EXPERT_WEIGHTS if holds_experts(module, EXPERT_WEIGHTS[0]) else ():
            stored = expert_weight_of(module, name)
            rows = stored.read() if isinstance(stored, DeferredRows) else stored
            if isinstance(rows, QuantizedRows):
                from services.executor.gpu.quantized_matmul import stacked_rows

                keep_quantized_experts(module, name, stacked_rows(rows.to(device), module.num_experts))


def use_products(model: Any, make: MakeProduct = make_product) -> None:
    """`products.use_products`; and has quantised embeddings be looked up in as they are."""
    products.use_products(model, make)
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(
            module.stored, Tensor | QuantizedRows | DeferredRows
        ):
            module.look_up_by(make_lookup(module.stored, module.weight.dtype))


def weight_codec(kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
    """How the weights of linear layers are kept; None: as they are computed with, which is `dtype`.

    Raises `ConfigurationError` where the GPU `device` cannot multiply by such weights.
    """
    rows = codec_of(kind)
    if rows is None:
        return None
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"--weight-dtype {kind} computes in bf16 and this model would be served in fp32; give --dtype bf16, "
            "or leave --weight-dtype at auto."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < rows.gpu_from:
        raise ConfigurationError(
            f"--weight-dtype {kind} needs a GPU that multiplies {kind} (compute capability 8.9: Ada, Hopper or newer) "
            f"and this one has {capability[0]}.{capability[1]}; use --weight-dtype int8, or leave it at auto."
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError(
            f"--weight-dtype {kind} needs Triton, which is not installed; install the triton that belongs to this "
            "torch, or leave --weight-dtype at auto."
        )
    return next(codec for codec in COMPRESSING if codec.name == kind) if rows.kv_codec else rows

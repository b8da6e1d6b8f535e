"""Models that PyTorch runs, with the codes of their weights packed: the native kernels multiply by them.

Linears, head and experts get products in place of their weights, an embedding looks its rows up. Activations are
rounded as in models that the kernels compute whole.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from services.executor.cpu.packed_linear import PackedLinear, one_after_another, packing, split_evenly
from services.executor.model.parallel.experts import expert_by_expert
from services.executor.model.parallel.layers import (
    LinearShard,
    VocabParallelEmbedding,
    WeightShard,
    keep_quantized_experts,
    multiply_experts_by,
    quantized_experts,
    stored_of,
)
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.native.library import RzModel
from shared.errors import ConfigurationError


class _Threads:
    """Those of the kernels. Not for several threads at once."""

    def __init__(self, library: Any, threads: int, cpus: Sequence[int]) -> None:
        self.library, self._model = library, RzModel()
        cores = (ctypes.c_int * threads)(*cpus) if cpus else None
        self.handle = library.rz_decoder_new(ctypes.byref(self._model), threads, cores)
        if not self.handle:
            raise no_room()

    def __del__(self) -> None:
        if self.handle:
            self.library.rz_decoder_free(self.handle)


def no_room() -> ConfigurationError:
    return ConfigurationError("There is no memory left for the working space of a product; free some memory.")


class PackedWeight:
    """A weight [out, in] that the kernels multiply by (`weight_formats.Packed`), with its bias."""

    def __init__(self, threads: _Threads, linear: PackedLinear) -> None:
        self._threads, self._linear, self._described = threads, linear, linear.describe()

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.outputs for part in self._linear.parts), self._linear.inputs

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, in] -> [T, out], of its dtype."""
        rows = x.to(torch.bfloat16).contiguous()
        out = torch.empty((len(rows), self.shape[0]), dtype=torch.float32)
        place = (ctypes.byref(self._described), rows.data_ptr(), len(rows), out.data_ptr())
        if len(rows) and self._threads.library.rz_decoder_multiply(self._threads.handle, *place):
            raise no_room()
        return out.to(x.dtype)

    def look_up(self, dtype: torch.dtype, rows: Tensor) -> Tensor:
        """Integers [T] -> those outputs [T, in]."""
        found = torch.empty((len(rows), self.shape[1]), dtype=torch.float32)
        form, packed = ctypes.byref(self._described.format), self._linear.packed.data_ptr()
        for place, row in zip(found, rows.tolist(), strict=True):
            self._threads.library.rz_quantized_row(place.data_ptr(), form, packed, row)
        return found.to(dtype)


def use_native_products(model: Any, library: Any, threads: int, cpus: Sequence[int] = ()) -> None:
    """Has the quantized weights of `model` packed and multiplied by the kernels of `library`, with `threads` threads.
    Raises `ConfigurationError`."""
    if not any(map(_holds_codes, model.modules())):
        return
    with packing(threads) as pool:
        shared = _Threads(library, threads, cpus)

        def packed(weight: QuantizedRows | DeferredRows, bias: Tensor | None) -> PackedWeight:
            return PackedWeight(shared, PackedLinear.of(library, one_after_another([(weight, bias)]), pool, threads))

        made: dict[int, PackedWeight] = {}  # of tied ones once
        for module in model.modules():
            if isinstance(module, WeightShard) and isinstance(stored := module.stored, QuantizedRows | DeferredRows):
                if (product := made.get(id(stored))) is None:
                    product = made[id(stored)] = packed(stored, getattr(module, "bias", None))
                module.keep_quantized(product)
                if isinstance(module, LinearShard):
                    module.multiply_by(product)
                elif isinstance(module, VocabParallelEmbedding):
                    module.look_up_by(partial(product.look_up, module.weight.dtype))
            _pack_experts(module, packed)


def _holds_codes(module: Any) -> bool:
    held = [module.stored] if isinstance(module, WeightShard) else quantized_experts(module).values()
    return any(isinstance(weight, QuantizedRows | DeferredRows) for weight in held)


def _pack_experts(module: Any, packed: Callable[[QuantizedRows | DeferredRows, None], PackedWeight]) -> None:
    """Those of `module`, if it has some."""
    for name, weight in quantized_experts(module).items():
        if not isinstance(weight, QuantizedRows | DeferredRows):
            continue
        products = [packed(cast("DeferredRows", one), None) for one in split_evenly(weight, module.num_experts)]
        halves = stored_of(module, name).halves
        multiply_experts_by(module, name, [partial(_in_turns, one) for one in products] if halves else [*products])
        keep_quantized_experts(module, name, None)
        if "forward" not in module.__dict__:  # it has none of our own
            module.forward = partial(expert_by_expert, module)


def _in_turns(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """All gate values, then all up values, as they take turns in the module."""
    return torch.stack(product(x).chunk(2, dim=1), dim=2).flatten(1)

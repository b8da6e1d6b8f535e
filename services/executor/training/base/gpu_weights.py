"""A frozen weight on a GPU, with the bits of its format: what serving multiplies by, unpacked by serving's kernel."""

import torch
from torch import Tensor

from services.executor.gpu.kernels.grouped import PackedRows, widened
from services.executor.gpu.quantized_matmul import packed_rows
from services.executor.model.quantized import QuantizedRows
from services.executor.training.base.weights import FrozenWeight, Scratch


class GroupedWeight:
    """Packed rows of a weight."""

    def __init__(self, weight: PackedRows) -> None:
        """`weight`: its columns are the inputs, in their order."""
        self._weight = weight
        self.outputs, self.inputs = weight.shape

    def rows(self, first: int, end: int, scratch: Scratch) -> Tensor:
        made = scratch.room(end - first, self.inputs)
        widened(self._weight, first, made)
        return made

    def picked(self, outputs: Tensor, scratch: Scratch) -> Tensor:
        made = torch.empty(len(outputs), self.inputs, dtype=scratch.dtype, device=outputs.device)
        widened(self._weight, 0, made, outputs)
        return made


def grouped_weight(weight: QuantizedRows) -> FrozenWeight | None:
    """`weight`, packed where it is; None where its columns are not its inputs in their order."""
    packed = packed_rows(weight)
    return GroupedWeight(packed) if packed.order is None and packed.columns == packed.inputs else None

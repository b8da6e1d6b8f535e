"""A frozen weight, unpacked when a product needs it and forgotten afterwards.

    mapped file (checkpoint, or packed for serving) ──rows [first, end)──▶ one buffer that all weights share ──▶ product

A plain weight that has the type of the computation is not copied: what it gives are its own pages.
"""

from typing import Protocol

import torch
from torch import Tensor

from services.executor.model.quantized import QuantizedRows

_CODES_AT_ONCE = 1 << 23
"""That are unpacked by PyTorch at once: it makes float32 of them first."""


class Scratch:
    """Room that one weight at a time is unpacked to, of a type that products are computed in."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._held = torch.empty(0, dtype=dtype, device=device)

    def room(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of undefined content, until the next call."""
        if self._held.numel() < rows * columns:
            self._held = torch.empty(0, dtype=self.dtype, device=self.device)  # not both at a time
            self._held = torch.empty(rows * columns, dtype=self.dtype, device=self.device)
        return self._held[: rows * columns].view(rows, columns)


class FrozenWeight(Protocol):
    """A weight [outputs, inputs] that nothing is changed of."""

    outputs: int
    inputs: int

    def rows(self, first: int, end: int, scratch: Scratch) -> Tensor:
        """The outputs [first, end), of the type of `scratch`, until that is used again."""
        ...

    def picked(self, outputs: Tensor, scratch: Scratch) -> Tensor:
        """The outputs of those numbers, int64 [n], as a tensor of its own of the type of `scratch`."""
        ...


class PlainWeight:
    """A tensor of floats, whose memory may be a mapped file's."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [outputs, inputs] of any floating dtype."""
        self._weight = weight
        self.outputs, self.inputs = weight.shape

    def rows(self, first: int, end: int, scratch: Scratch) -> Tensor:
        part = self._weight[first:end]
        return part if part.dtype is scratch.dtype else scratch.room(*part.shape).copy_(part)

    def picked(self, outputs: Tensor, scratch: Scratch) -> Tensor:
        return self._weight[outputs].to(scratch.dtype)


class CodedWeight:
    """Codes with scales, unpacked by PyTorch: on GPUs, and of models that the native kernels do not compute."""

    def __init__(self, weight: QuantizedRows) -> None:
        self._weight = weight
        self.outputs, self.inputs = weight.shape

    def rows(self, first: int, end: int, scratch: Scratch) -> Tensor:
        made = scratch.room(end - first, self.inputs)
        step = max(1, _CODES_AT_ONCE // self.inputs)
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            made[begin - first : stop - first].copy_(self._weight.rows(begin, stop).dequantized())
        return made

    def picked(self, outputs: Tensor, scratch: Scratch) -> Tensor:
        return self._weight.picked(outputs).dequantized().to(scratch.dtype)

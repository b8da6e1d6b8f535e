"""A frozen weight, unpacked when a product needs it and forgotten afterwards.

    mapped file (checkpoint, or packed for serving) ──rows [first, end)──▶ one buffer that all weights share ──▶ product

A plain weight that has the type of the computation is not copied: what it gives are its own pages.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.executor.cpu.packed_linear import PackedLinear
from services.executor.model.quantized import QuantizedRows
from services.executor.native.library import RzFormat

_CODES_AT_ONCE = 1 << 23  # that are unpacked by PyTorch at once: it makes float32 of them first


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


@dataclass(frozen=True)
class PackedOutputs:
    """Outputs of a module in a packed linear: its row `begin + i` is the linear's output
    `first + i // run * step + i % run`."""

    linear: PackedLinear
    begin: int
    rows: int
    first: int
    run: int
    step: int


class PackedBaseWeight:
    """What is packed for the native kernels, unpacked by them."""

    def __init__(self, library: Any, parts: Sequence[PackedOutputs], inputs: int, pool: Executor, threads: int) -> None:
        """`parts`: rows of the weight, end to end."""
        self.outputs = sum(part.rows for part in parts)
        self.inputs = inputs
        self._library = library
        self._parts = parts
        self._formats = [_format_of(part.linear) for part in parts]
        self._pool, self._threads = pool, threads

    def rows(self, first: int, end: int, scratch: Scratch) -> Tensor:
        made = scratch.room(end - first, self.inputs)
        self._fill(made, first, end, self._threads)
        return made

    def picked(self, outputs: Tensor, scratch: Scratch) -> Tensor:
        wanted, places = torch.unique(outputs, return_inverse=True)
        made = torch.empty(len(wanted), self.inputs, dtype=scratch.dtype)
        for row, output in enumerate(wanted.tolist()):
            self._fill(made[row : row + 1], output, output + 1, 1)
        return made[places]

    def _fill(self, made: Tensor, first: int, end: int, threads: int) -> None:
        for part, form in zip(self._parts, self._formats, strict=True):
            begin, stop = max(first, part.begin), min(end, part.begin + part.rows)
            if begin < stop:
                into = made[begin - first : stop - first]
                self._unpack(into, part, form, begin - part.begin, stop - part.begin, threads)

    def _unpack(self, into: Tensor, part: PackedOutputs, form: RzFormat, begin: int, stop: int, threads: int) -> None:
        """Rows [begin, stop) of `part`, to `into`."""
        order, columns = part.linear.permutation, form.columns if form.bits else self.inputs
        room = into if order is None else torch.empty(stop - begin, columns, dtype=into.dtype)
        step = -(-(stop - begin) // (threads * _TOGETHER)) * _TOGETHER

        def unpack(start: int) -> None:
            self._library.rz_unpack_rows(
                room[start - begin].data_ptr(),
                into.dtype is torch.float32,
                room.stride(0),
                ctypes.byref(form),
                part.linear.packed.data_ptr(),
                self.inputs,
                *(part.first, part.run, part.step, start, min(start + step, stop)),
            )

        starts = range(begin, stop, step)
        if len(starts) == 1:
            unpack(begin)
        else:
            for job in [self._pool.submit(unpack, start) for start in starts]:
                job.result()
        if order is not None:
            there = order >= 0
            into.zero_()[:, order[there].long()] = room[:, there]


_TOGETHER = 32  # rows that one thread unpacks at least, which lie together


def _format_of(linear: PackedLinear) -> RzFormat:
    """The permutation is none of the kernel's."""
    return RzFormat() if linear.form is None else linear.form.describe(None)


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

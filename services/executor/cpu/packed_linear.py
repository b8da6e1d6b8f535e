"""Weights in the order in which the kernels read them (see `gemm.h`)."""

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.executor.model.loading.arena import fresh
from services.executor.native.library import Linear

GATE_RUN = 16
"""Gate and up projections alternate by as many outputs: one vector of each meets in registers."""
PANEL = 32
"""Outputs that are packed together."""


@dataclass(frozen=True)
class Piece:
    """Rows of a packed weight that come from one tensor: row i goes to `first + i // run * step + i % run`."""

    weight: Tensor
    """bf16 [rows, in]; rows are contiguous"""
    bias: Tensor | None
    first: int
    run: int
    step: int

    def cut(self, parts: int) -> list["Piece"]:
        """The same rows in about `parts` pieces of whole runs, without their bias."""
        rows = self.weight.shape[0]
        size = -(-rows // (parts * GATE_RUN)) * GATE_RUN
        cuts = []
        for start in range(0, rows, size):
            first = self.first + start // self.run * self.step + start % self.run
            cuts.append(Piece(self.weight[start : start + size], None, first, self.run, self.step))
        return cuts

    def places(self) -> Tensor:
        """int64 [rows]: where the rows go."""
        rows = torch.arange(self.weight.shape[0])
        return self.first + rows // self.run * self.step + rows % self.run


def one_after_another(parts: Iterable[tuple[Tensor, Tensor | None]]) -> list[Piece]:
    """Weights [rows, in] with their biases, end to end."""
    pieces = []
    first = 0
    for weight, bias in parts:
        rows = weight.shape[0]
        pieces.append(Piece(weight, bias, first, max(rows, 1), max(rows, 1)))
        first += rows
    return pieces


def alternating(gate: tuple[Tensor, Tensor | None], up: tuple[Tensor, Tensor | None]) -> list[Piece]:
    """A gate and an up projection of equally many rows, a multiple of 16, in alternating runs."""
    return [Piece(*gate, 0, GATE_RUN, 2 * GATE_RUN), Piece(*up, GATE_RUN, GATE_RUN, 2 * GATE_RUN)]


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight and its bias, with what owns their memory."""

    packed: Tensor
    """uint8 [bytes]"""
    bias: Tensor | None
    """float32 [outputs, rounded up to whole panels]"""
    outputs: int
    inputs: int

    @classmethod
    def of(cls, library: Any, pieces: list[Piece], pool: Executor, threads: int) -> "PackedLinear":
        """Packs with `threads` threads of `pool`."""
        outputs = sum(piece.weight.shape[0] for piece in pieces)
        inputs = pieces[0].weight.shape[1]
        packed = fresh(library.rz_packed_bytes(outputs, inputs))
        if outputs % PANEL or inputs % 2:
            packed.zero_()  # what fills up the last panel and pair counts as zero
        jobs = [part for piece in pieces for part in piece.cut(threads)]
        for job in [pool.submit(_pack, library, part, packed) for part in jobs]:
            job.result()
        return cls(packed, _joined_bias(pieces, outputs), outputs, inputs)

    def describe(self) -> Linear:
        """The structure that the kernels take."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Linear(self.packed.data_ptr(), bias, self.outputs, self.inputs)


def _pack(library: Any, piece: Piece, packed: Tensor) -> None:
    weight = piece.weight
    rows, inputs = weight.shape
    places = (piece.first, piece.run, piece.step)
    library.rz_pack(packed.data_ptr(), weight.data_ptr(), rows, inputs, weight.stride(0), *places)


def _joined_bias(pieces: list[Piece], outputs: int) -> Tensor | None:
    """float32 [outputs, rounded up to whole panels]"""
    if all(piece.bias is None for piece in pieces):
        return None
    joined = torch.zeros(-(-outputs // PANEL) * PANEL)
    for piece in pieces:
        if piece.bias is not None:
            joined[piece.places()] = piece.bias.float()
    return joined

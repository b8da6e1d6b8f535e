"""How a model's parameter is composed of checkpoint tensors: boxes of them, placed side by side.

    mlp.experts.gate_up_proj [E, 2I, H]                  one part for each expert and projection:
      expert 0 │ gate_proj of 0 │ up_proj of 0 │           source "...experts.0.gate_proj.weight"
      expert 1 │ gate_proj of 1 │ up_proj of 1 │           axes   (new, 0, 1)
                                                           at     (0, 0, 0)    size (1, I, H)

Stacking, concatenating, transposing and cutting only move boxes, so a rank's slice of a composed parameter
is read without reading the rest. Pure arithmetic but for `view`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self, TypeVar

from torch import Tensor

from services.executor.core.sharding import ShardRange

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorBox:
    """A box of one checkpoint tensor and its place in the composed one."""

    source: str  # the checkpoint's name of the tensor
    # For each dimension of the composed tensor the source's dimension, None for a new one of size 1.
    axes: tuple[int | None, ...]
    origin: tuple[int, ...]  # where the box begins in the source, by dimensions of the composed tensor
    at: tuple[int, ...]  # where the box begins in the composed tensor
    size: tuple[int, ...]
    # Which along the source's first dimension, that `axes` do not count; None: they count all.
    matrix: int | None = None

    def view(self, stored: Tensor) -> Tensor:
        """The box of `stored`, the source tensor, of shape `size`. Shares its memory."""
        stored = stored if self.matrix is None else stored[self.matrix]
        box = stored.permute([axis for axis in self.axes if axis is not None])
        for dim, axis in enumerate(self.axes):
            if axis is None:
                box = box.unsqueeze(dim)
        for dim, (start, size) in enumerate(zip(self.origin, self.size, strict=True)):
            box = box.narrow(dim, start, size)
        return box

    def place(self, composed: Tensor) -> Tensor:
        """The box's place in `composed`, of shape `size`. Shares its memory."""
        for dim, (start, size) in enumerate(zip(self.at, self.size, strict=True)):
            composed = composed.narrow(dim, start, size)
        return composed

    def moved(self, dim: int, by: int) -> "TensorBox":
        """The same box, `by` further along dimension `dim` of the composed tensor."""
        return replace(self, at=_changed(self.at, dim, self.at[dim] + by))

    def cut(self, dim: int, span: ShardRange) -> "TensorBox | None":
        """What lies in `span` of dimension `dim`, placed as if `span` were all; None where nothing does."""
        start = max(span.start, self.at[dim])
        stop = min(span.stop, self.at[dim] + self.size[dim])
        if start >= stop:
            return None
        return replace(
            self,
            origin=_changed(self.origin, dim, self.origin[dim] + start - self.at[dim]),
            at=_changed(self.at, dim, start - span.start),
            size=_changed(self.size, dim, stop - start),
        )


@dataclass(frozen=True)
class Composition:
    """A tensor of `shape` whose `parts` cover it once."""

    shape: tuple[int, ...]
    parts: tuple[TensorBox, ...]

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> Self:
        """The checkpoint's tensor `source` as it is."""
        shape = tuple(shape)
        zeros = (0,) * len(shape)
        return cls(shape, (TensorBox(source, tuple(range(len(shape))), zeros, zeros, shape),))

    def transposed(self, a: int, b: int) -> "Composition":
        """Dimensions `a` and `b` exchanged."""

        def swapped(part: TensorBox) -> TensorBox:
            origin, at, size = (_swapped(values, a, b) for values in (part.origin, part.at, part.size))
            return TensorBox(part.source, _swapped(part.axes, a, b), origin, at, size, part.matrix)

        return Composition(_swapped(self.shape, a, b), tuple(map(swapped, self.parts)))

    def selected(self, dim: int, spans: Sequence[ShardRange]) -> "Composition":
        """`spans` of dimension `dim`, end to end."""
        return concatenated([self._span(dim, span) for span in spans], dim)

    def split(self, sizes: Sequence[int], dim: int) -> "list[Composition]":
        """Pieces of `sizes` along dimension `dim`."""
        return [self._span(dim, ShardRange(*ends)) for ends in pairwise(accumulate(sizes, initial=0))]

    def _span(self, dim: int, span: ShardRange) -> "Composition":
        pieces = (part.cut(dim, span) for part in self.parts)
        return Composition(_changed(self.shape, dim, span.size), tuple(piece for piece in pieces if piece is not None))

    def unsqueezed(self, dim: int) -> "Composition":
        """A new dimension `dim` of size 1."""
        parts = tuple(
            TensorBox(
                part.source,
                _inserted(part.axes, dim, None),
                _inserted(part.origin, dim, 0),
                _inserted(part.at, dim, 0),
                _inserted(part.size, dim, 1),
                part.matrix,
            )
            for part in self.parts
        )
        return Composition(_inserted(self.shape, dim, 1), parts)

    def flattened(self) -> "Composition | None":
        """Of three dimensions, the first two as one: matrices one below the other. None where a part is neither a
        matrix nor a stack of them."""
        rows, columns = self.shape[1:]
        parts: list[TensorBox] = []
        for part in self.parts:
            if part.axes not in ((None, 0, 1), (0, 1, 2)) or (part.axes[0] == 0 and part.matrix is not None):
                return None
            for index in range(part.size[0]):
                at = ((part.at[0] + index) * rows + part.at[1], part.at[2])
                matrix = part.matrix if part.axes[0] is None else part.origin[0] + index
                parts.append(TensorBox(part.source, (0, 1), part.origin[1:], at, part.size[1:], matrix))
        return Composition((self.shape[0] * rows, columns), tuple(parts))


def concatenated(pieces: Sequence[Composition], dim: int) -> Composition:
    """`pieces` end to end along `dim`. Raises `ValueError` where their other dimensions differ."""
    rests = {_without(piece.shape, dim) for piece in pieces}
    if len(rests) != 1:
        shapes = sorted({piece.shape for piece in pieces})
        raise ValueError(f"tensors of the shapes {', '.join(str(list(shape)) for shape in shapes)}")
    parts: list[TensorBox] = []
    length = 0
    for piece in pieces:
        parts += [part.moved(dim, length) for part in piece.parts]
        length += piece.shape[dim]
    return Composition(_changed(pieces[0].shape, dim, length), tuple(parts))


def stacked(pieces: Sequence[Composition], dim: int) -> Composition:
    """`pieces` along a new dimension `dim`. Raises `ValueError` where their shapes differ."""
    return concatenated([piece.unsqueezed(dim) for piece in pieces], dim)


def _changed(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _inserted(values: tuple[_T, ...], dim: int, value: _T) -> tuple[_T, ...]:
    return (*values[:dim], value, *values[dim:])


def _swapped(values: tuple[_T, ...], a: int, b: int) -> tuple[_T, ...]:
    changed = list(values)
    changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)

"""What the ranks of a ring say to each other about tensors.

Two operations are enough: a sum that every rank gets, and a gather that only the leader gets.
Step plans do not travel here.

    CUDA                 NCCL            torch_distributed.py
    CPU, one host        shared memory   shared_memory.py
    CPU, on request      gloo            torch_distributed.py
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Called by every rank of the ring in the same order. Raises `shared.errors.RingLost` when one is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def busy_seconds(self) -> float:
        """Spent in operations so far, waiting for other ranks included."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` (contiguous) over the ranks, in place, and returns it."""
        ...

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        """Every rank's `tensor` on rank 0, in rank order; None on the others.

        All dimensions but the last agree; `widths` [world size] names the last one of each rank.
        """
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        ...

    def close(self) -> None:
        """Leaves the ring. Safe to call twice."""
        ...


def of_all_ranks(mine: Tensor, collectives: Collectives) -> Tensor:
    """[world size, *its shape]: every rank's `mine`, on all of them, by a sum in which each fills its own place."""
    places = mine.new_zeros((collectives.world_size, *mine.shape))
    places[collectives.rank] = mine
    return collectives.all_reduce(places)


class Wrapped:
    """`Collectives` that do what `inner` do, but for what a subclass does otherwise."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size

    @property
    def busy_seconds(self) -> float:
        return self._inner.busy_seconds

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._inner.all_reduce(tensor)

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return self._inner.gather_to_leader(tensor, widths)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class InRankOrder(Wrapped):
    """Sums are taken in the ranks' order, whatever order those of `inner` have.

    Every rank's numbers travel in a place of their own, beside zeros: as many times the bytes as there are ranks. Of
    two ranks any order gives the same.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size <= 2:
            return self._inner.all_reduce(tensor)
        first, *others = of_all_ranks(tensor, self._inner)
        tensor.copy_(first)
        for other in others:
            tensor.add_(other)
        return tensor


class SingleRank:
    rank = 0
    world_size = 1
    busy_seconds = 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return [tensor]

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return

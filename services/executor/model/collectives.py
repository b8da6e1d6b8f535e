"""What the ranks of a ring say to each other about tensors.

Two operations are enough: a sum that every rank gets, and a gather that only the leader gets.
Step plans do not travel here.

    CUDA                 NCCL            collectives_torch.py
    CPU, one host        shared memory   collectives_shm.py
    CPU, on request      gloo            collectives_torch.py
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


class SingleRank:
    """The ring of one rank: nothing to say."""

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

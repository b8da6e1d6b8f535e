"""What the ranks of a ring say to each other about tensors.

Two operations are enough: a sum that every rank gets, and a gather that only the leader gets.
Step plans do not travel here.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import RingLost


class Collectives(Protocol):
    """Called by every rank of the ring in the same order. Raises `shared.errors.RingLost` when one is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return [tensor]

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


class TorchDistributed:
    """`torch.distributed` over the process group it is given: gloo on CPU, NCCL on CUDA."""

    def __init__(self, group: dist.ProcessGroup):
        self._group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._leader = dist.get_global_rank(group, 0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        # Neither backend gathers uneven shapes, so narrow shares travel padded and are cut on arrival.
        widest = max(widths)
        padded = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        try:
            dist.gather(padded, parts, dst=self._leader, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        if parts is None:
            return None
        return [part[..., :width] for part, width in zip(parts, widths, strict=True)]

    def barrier(self) -> None:
        try:
            dist.barrier(group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)


def _lost(error: RuntimeError) -> RingLost:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RingLost(f"A rank of the ring is gone ({reason}); the ring is restarted and the request goes on.")

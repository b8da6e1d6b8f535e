"""Sums over the ranks of a ring, each of which pretends to have a GPU: queued like everything else, also in graphs."""

from collections.abc import Sequence

from torch import Tensor

from services.executor.collectives.base import Collectives
from tests.pretend_gpu.tensors import launch


class PretendNccl:
    """`Collectives` whose tensors are on the device, by others for the host's."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.rank, self.world_size, self.busy_seconds = inner.rank, inner.world_size, 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed: Tensor = launch("all_reduce_", self._inner.all_reduce, (tensor,), {})
        return summed

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        parts: list[Tensor] | None = launch(
            "gather", lambda one: self._inner.gather_to_leader(one, widths), (tensor,), {}
        )
        return parts

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        return

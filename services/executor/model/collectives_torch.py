"""Collectives over `torch.distributed`: NCCL between GPUs; gloo between CPUs, over sockets."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it without saying so

from services.executor.model.communication_time import CommunicationTime
from shared.errors import RingLost


class TorchDistributed:
    """`torch.distributed` over the process group it is given."""

    def __init__(self, group: dist.ProcessGroup):
        self._group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._leader = dist.get_global_rank(group, 0)
        self._time = CommunicationTime()

    @classmethod
    def join(cls, backend: str, store: Store, rank: int, world_size: int) -> "TorchDistributed":
        """Joins the process group that meets at `store`. `backend`: "gloo" or "nccl"."""
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(days=1),  # a hang is seen by the orchestrator, and idle is no hang
        )
        assert dist.group.WORLD is not None
        return cls(dist.group.WORLD)

    @property
    def busy_seconds(self) -> float:
        return self._time.seconds

    def all_reduce(self, tensor: Tensor) -> Tensor:
        try:
            with self._time.measured(tensor.device):
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
            with self._time.measured(tensor.device):
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

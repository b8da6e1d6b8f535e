"""Collectives over `torch.distributed`: NCCL between GPUs; gloo between CPUs, over sockets.

On a GPU an operation is queued and the call returns: one that another rank does not come to is a kernel that does not
end. It is seen as any kernel that hangs is (`core/progress.py`), and ended as any process is that hangs.

How long operations take is measured without making them take longer. On a CPU an operation ends when it returns: two
looks at the clock. On a GPU it has only been queued then, so a pair of CUDA events is queued around it, and read when
both have happened; that for one operation of `SAMPLE`, which then stands for all of them. `SAMPLE` is a prime, so that
every place in a model is measured in turn.

Operations within a CUDA graph are not counted: what is told of steps that are replayed lacks their communication.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it without saying so

from services.executor.core.gpu_errors import is_gpu_error
from shared.errors import RingLost, reason_of

ABORT_PATIENCE = 2.0  # seconds that leaving NCCL may take


class TorchDistributed:
    """`torch.distributed` over the process group it is given. With NCCL nothing here waits for the device but
    `barrier`, and sums can be captured in CUDA graphs."""

    def __init__(self, group: dist.ProcessGroup):
        self._group: dist.ProcessGroup | None = group
        self._aborts = dist.get_backend(group) == "nccl"
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._leader = dist.get_global_rank(group, 0)
        self._time = CommunicationTime()

    @classmethod
    def join(
        cls, backend: str, store: Store, rank: int, world_size: int, device: torch.device | None = None
    ) -> "TorchDistributed":
        """Joins the process group that meets at `store`. `backend`: "gloo", or "nccl" with the `device` that this
        rank computes on, to which the group is bound: it connects at once, and not in the first step."""
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(days=1),  # a hang is seen by the supervisor, and idle is no hang
            device_id=device if backend == "nccl" else None,
        )
        assert dist.group.WORLD is not None
        return cls(dist.group.WORLD)

    @property
    def group(self) -> dist.ProcessGroup:
        assert self._group is not None, "the ring has been left"
        return self._group

    @property
    def busy_seconds(self) -> float:
        return self._time.seconds

    def measured(self, device: torch.device) -> AbstractContextManager[None]:
        """Counts an operation within it, on `device`, as communication."""
        return self._time.measured(device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with _telling(), self._time.measured(tensor.device):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        # Neither backend gathers uneven shapes, so narrow shares travel padded and are cut on arrival.
        widest = max(widths)
        padded = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        with _telling(), self._time.measured(tensor.device):
            dist.gather(padded, parts, dst=self._leader, group=self._group)
        if parts is None:
            return None
        return [part[..., :width] for part, width in zip(parts, widths, strict=True)]

    def barrier(self) -> None:
        with _telling():
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Leaves the ring. NCCL is aborted: its orderly end waits for ranks that may be gone. An abort waits too, for
        CUDA graphs that hold its operations (so they must be let go first) and for a device that is stuck; after
        `ABORT_PATIENCE` it is left to itself, and to the end of the process."""
        if self._group is None:
            return
        group, self._group = self._group, None
        if self._aborts:
            aborting = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_PATIENCE)
        else:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Errors of the group as `RingLost`; those of the GPU go on to where the rank ends."""
    try:
        yield
    except RuntimeError as error:
        if is_gpu_error(error):
            raise
        reason = reason_of(error)
        raise RingLost(
            f"A rank of the ring is gone ({reason}); the ring is restarted and the request continues."
        ) from error


SAMPLE = 17


class CommunicationTime:
    """Adds up the seconds of the operations run within `measured()`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._operations = 0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def seconds(self) -> float:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            self._seconds += SAMPLE * begin.elapsed_time(end) / 1e3
        return self._seconds

    @contextlib.contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        self._operations += 1
        # What a graph records happens at each of its replays, and an event recorded in one cannot be asked.
        if self._operations % SAMPLE or torch.cuda.is_current_stream_capturing():
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

"""How work on a device is recorded once, to be done again by one launch."""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]
"""Launches kernels over tensors that stay where they are, and waits for nothing."""


class Capture(Protocol):
    """Records work. What is recorded may share its memory with what was recorded before: the results of one are
    gone once another is replayed, unless they lie in tensors made outside."""

    def warm_up(self, work: Work) -> None:
        """Does `work` once, so that everything it compiles, loads or sets up the first time is there."""
        ...

    def record(self, work: Work) -> Work:
        """What does `work` again, once it has been warmed up. Raises what PyTorch does where it cannot be recorded."""
        ...

    def memory(self) -> int:
        """Bytes of the device's memory that are in use, by whomever."""
        ...


class CudaCapture:
    """CUDA graphs, whose intermediate results lie in one pool of memory
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Work is warmed up on the stream that it is recorded on, so that the workspaces of matrix products, which PyTorch
    keeps for each stream, are not in the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._spoiled: list[torch.cuda.CUDAGraph] = []
        """Kept: torch before 2.12 does not forget a capture that was spoiled, and asks its graph at allocations."""

    def warm_up(self, work: Work) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads may ask for events or memory meanwhile: only what this one calls is recorded.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            self._spoiled.append(graph)
            raise
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own as the current one
        replay: Work = graph.replay
        return replay

    def memory(self) -> int:
        torch.cuda.empty_cache()  # else what an earlier step has left counts, and is gone at the next capture
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class Rerun:
    """For devices without graphs: work is done by doing it. Staging, padding and the reuse of buffers are the same,
    and so tests of them need no GPU."""

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        return work

    def memory(self) -> int:
        return 0

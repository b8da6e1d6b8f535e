"""Marks in the work of a GPU: see `device_progress.py`."""

import torch

from services.executor.gpu.device_progress import NUMBERS


class CudaMarks:
    """`Marks` on one device: a mark copies its number, 8 bytes, from the device into pinned host memory.

    The copy is ordered behind the stream's kernels, as each of them is, and needs no kernel of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.split(torch.arange(NUMBERS, dtype=torch.int64, device=device), 1)
        self._pinned = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = self._pinned.numpy()  # an aligned word, written at once, as the board's are
        torch.cuda.synchronize(device)  # the numbers are there for whichever stream marks first

    def put(self, number: int) -> None:
        self._pinned.copy_(self._numbers[number], non_blocking=True)

    @property
    def last(self) -> int:
        return int(self._seen[0])

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

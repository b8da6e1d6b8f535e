"""How long the operations of `torch.distributed` take, measured without making them take longer.

On a CPU an operation ends when it returns: two looks at the clock. On a GPU it has only been queued then, so a pair
of CUDA events is queued around it, and read when both have happened; that for one operation of `SAMPLE`, which then
stands for all of them. `SAMPLE` is a prime, so that every place in a model is measured in turn.

Operations within a CUDA graph are not counted: what is told of steps that are replayed lacks their communication.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

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

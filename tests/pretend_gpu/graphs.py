"""CUDA graphs: what was called while one was captured is done again by its replay, and nothing else is.

Results that were made in a capture lie where they lay. Those of other graphs of the same pool hold nothing that may be
looked at once one of them has been replayed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.pretend_gpu.streams import HOST, Stream


class Entry(NamedTuple):
    call: Callable[[], Any]  # returns as many tensors as `made`, or nothing
    made: list[Tensor]  # in memory of their own


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.pool: list[Graph] = []

    def add(self, call: Callable[[], Any], made: list[Tensor]) -> None:
        self.entries.append(Entry(call, made))

    def replay(self) -> None:
        HOST.stream.given += 1
        for graph in self.pool:
            if graph is not self:
                graph.spoil()
        for entry in self.entries:
            again = entry.call()
            for place, value in zip(entry.made, again, strict=False):
                place.copy_(value)

    def spoil(self) -> None:
        for entry in self.entries:
            for tensor in entry.made:
                spoil(tensor)


class capture(AbstractContextManager[None]):  # noqa: N801  # as torch.cuda.graph is called
    """`torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: list[Graph] | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._graph.pool = [] if pool is None else pool
        self._stream = stream or Stream()

    def __enter__(self) -> None:
        HOST.wait_for_all("torch.cuda.graph")
        self._before = HOST.stream
        HOST.stream = self._stream
        self._stream.wait_stream(self._before)  # synchronised, as torch does
        HOST.recording = self._graph

    def __exit__(self, failed: object, *_: object) -> None:
        HOST.recording = None
        if failed:
            return  # as torch's, whose end raises before the stream is changed back
        HOST.stream = self._before
        self._before.wait_stream(self._stream)
        self._graph.pool.append(self._graph)


def spoil(tensor: Tensor) -> Tensor:
    """With what fresh memory may hold."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else 77)

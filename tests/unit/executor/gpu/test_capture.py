"""How CUDA is asked for a graph, with `torch.cuda` doubled: on which stream, and what a failure leaves."""

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from services.executor.gpu.graphs import CudaCapture

GPU = torch.device("cuda", 1)


class FakeCuda:
    """One thread's view of a device: the current stream, and what waits for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = FakeStream("default", self)
        self.current: FakeStream = self.default
        self.done: list[str] = []
        self.graphs: list[weakref.ref[FakeGraph]] = []
        self.broken = False
        self.kept = 2
        doubles: dict[str, Any] = {
            "Stream": lambda device: FakeStream("capture", self),
            "graph_pool_handle": lambda: (0, 7),
            "CUDAGraph": FakeGraph,
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "synchronize": lambda device: self.done.append("synchronize"),
            "graph": self.graph,
            "empty_cache": lambda: setattr(self, "kept", 0),
            "mem_get_info": lambda device: (3 - self.kept, 10),
        }
        for name, double in doubles.items():
            monkeypatch.setattr(torch.cuda, name, double)

    def set_stream(self, stream: "FakeStream") -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: "FakeStream") -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: "FakeGraph", pool: Any, stream: "FakeStream", capture_error_mode: str) -> Any:
        """As torch's, whose end raises before the stream is changed back where a capture was spoiled."""
        assert (pool, capture_error_mode) == ((0, 7), "thread_local")
        self.graphs.append(weakref.ref(graph))
        before, self.current = self.current, stream
        yield
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name, self._cuda = name, cuda

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.done.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def replay(self) -> None:
        return


def test_work_is_warmed_up_on_the_stream_that_it_is_recorded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces are kept for each stream; and what was staged before comes first, what follows comes later."""
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture(GPU)

    def work() -> None:
        cuda.done.append(f"work on {cuda.current.name}")

    capture.warm_up(work)
    assert cuda.done == [
        "capture waits for default",
        "work on capture",
        "default waits for capture",
        "synchronize",
    ]
    assert callable(capture.record(work))
    assert cuda.done[4:] == ["work on capture"]
    assert cuda.current is cuda.default
    assert capture.memory() == 7, "what torch keeps without need is not in use"


def test_a_capture_that_was_spoiled_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture(GPU)
    cuda.broken = True
    with pytest.raises(RuntimeError, match="previous error"):
        capture.record(lambda: None)
    assert cuda.current is cuda.default
    gc.collect()
    assert [graph() is not None for graph in cuda.graphs] == [True], "torch may still ask it"

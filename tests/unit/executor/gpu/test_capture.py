"""How CUDA is asked for a graph: on which stream, and what a failure leaves."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.gpu.graphs import CudaCapture
from tests.pretend_gpu.streams import Host

GPU = torch.device("cuda", 0)


def test_work_is_warmed_up_on_the_stream_that_it_is_recorded_on(gpu: Host) -> None:
    """Workspaces are kept for each stream; and what was staged before comes first, what follows comes later."""
    numbers, streams = torch.ones(2, device=GPU), [torch.cuda.current_stream(GPU)]
    capture = CudaCapture(GPU)

    def work() -> None:
        streams.append(torch.cuda.current_stream(GPU))
        numbers.add_(1)

    capture.warm_up(work)
    numbers.mul_(2)  # on the stream that waits for the other
    replay = capture.record(work)
    numbers.fill_(4)
    replay()
    assert numbers.tolist() == [5.0, 5.0]
    assert streams[1] is streams[2] is not streams[0]
    assert torch.cuda.current_stream(GPU) is streams[0]
    assert capture.memory() == 0


def test_a_capture_that_was_spoiled_leaves_the_stream_as_it_was(gpu: Host) -> None:
    before, numbers = torch.cuda.current_stream(GPU), torch.ones(2, device=GPU)
    made: list[weakref.ref[object]] = []

    def work() -> None:
        made.append(weakref.ref(gpu.recording))
        numbers.tolist()

    capture = CudaCapture(GPU)
    with pytest.raises(RuntimeError, match="capturing"):
        capture.record(work)
    assert torch.cuda.current_stream(GPU) is before
    gc.collect()
    assert made[0]() is not None, "torch may still ask it"

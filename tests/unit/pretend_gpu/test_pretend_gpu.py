"""The pretended GPU finds what it is there to find, and does what a GPU would do with what is right."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it launches kernels by Triton's interpreter (Linux on x86-64)")

import triton
import triton.language as tl

from tests.pretend_gpu.device import pretend_gpu
from tests.pretend_gpu.streams import Host, Misuse

GPU = torch.device("cuda", 0)


@triton.jit
def add_one(values, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = values + tl.arange(0, size)
    tl.store(at, tl.load(at) + 1)


@pytest.fixture
def gpu() -> Iterator[Host]:
    with pretend_gpu() as host:
        yield host


@pytest.mark.usefixtures("gpu")
def test_operands_of_two_devices_are_refused() -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for wrong in (
        lambda: there + here,
        lambda: there.index_select(0, torch.tensor([1])),
        lambda: torch.cat((there, here)),
        lambda: torch.mm(there.view(1, 3), here.view(3, 1)),
        lambda: torch.add(here, here, out=there),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # numbers may come from anywhere
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(ValueError, match="cpu tensor"):
        add_one[(1,)](here, size=1)


def test_waiting_for_the_device_is_noted(gpu: Host) -> None:
    values = torch.ones(3, device="cuda")
    pinned = torch.zeros(3, pin_memory=True)
    torch.full((2,), 3, device="cuda").mul_(2).sum().clamp(max=5)
    values.copy_(pinned, non_blocking=True)
    pinned.copy_(values, non_blocking=True)
    assert gpu.waits == []
    for waiting in (
        lambda: values.sum().item(),
        lambda: bool(values[0] > 0),
        lambda: values.cpu(),
        lambda: values.tolist(),
        lambda: values[values > 0],
        lambda: values.nonzero(),
        lambda: torch.zeros(3).to(GPU),
        lambda: torch.zeros(3).to(GPU, non_blocking=True),  # memory that is not pinned
        lambda: values.copy_(torch.zeros(3)),
        lambda: torch.zeros(3).copy_(values),
        lambda: torch.tensor([1], device=GPU),
        torch.cuda.synchronize,
    ):
        gpu.waits.clear()
        waiting()
        assert len(gpu.waits) == 1


@pytest.mark.usefixtures("gpu")
def test_pinned_memory_holds_what_was_copied_once_that_is_over() -> None:
    values, pinned = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    done = torch.cuda.Event()
    pinned.copy_(values, non_blocking=True)
    done.record()
    values.fill_(2)  # behind the copy
    assert pinned.tolist() != [1.0] * 3
    done.synchronize()
    assert pinned.tolist() == [1.0] * 3


@pytest.mark.usefixtures("gpu")
def test_pinned_memory_must_stay_until_it_was_copied() -> None:
    values, pinned = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    values.copy_(pinned, non_blocking=True)
    pinned[1] = 7
    with pytest.raises(Misuse, match="pinned memory"):
        torch.cuda.synchronize()


@pytest.mark.usefixtures("gpu")
def test_streams_must_wait_for_each_other() -> None:
    values, other = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other), pytest.raises(Misuse, match="another stream"):
        values.add_(1)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        doubled = values * 2
        event = torch.cuda.Event()
        event.record()
    values + 1  # both only read
    with pytest.raises(Misuse, match="another stream"):
        doubled + 1
    event.synchronize()
    assert (doubled + 1).tolist() == [3.0] * 3


@pytest.mark.usefixtures("gpu")
def test_fresh_memory_holds_nothing_of_use() -> None:
    assert torch.empty(2, device="cuda").isnan().all()
    assert torch.empty_like(torch.zeros(2, device="cuda", dtype=torch.int64)).tolist() != [0, 0]


@pytest.mark.usefixtures("gpu")
def test_a_graph_does_again_what_was_launched_and_nothing_else() -> None:
    values, result = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
    factor = 2.0  # a graph keeps it

    def work() -> None:
        scratch = torch.empty(4, device="cuda")
        torch.mul(values, factor, out=scratch)
        add_one[(1,)](scratch, size=4)
        result.copy_(scratch.view(2, 2).t().reshape(4))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    factor = 100.0
    values.fill_(5)
    graph.replay()
    assert result.tolist() == [11.0] * 4
    for waiting in (lambda: values.sum().item(), torch.cuda.synchronize, lambda: values.copy_(torch.ones(4))):
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            waiting()


@pytest.mark.usefixtures("gpu")
def test_graphs_of_a_pool_share_their_memory() -> None:
    values, kept = torch.ones(2, device="cuda"), list[Tensor]()
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            kept.append(values * 3)
    graphs[0].replay()
    assert kept[0].tolist() == [3.0, 3.0]
    graphs[1].replay()
    assert kept[0].isnan().all()

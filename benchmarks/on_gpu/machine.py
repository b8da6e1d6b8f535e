"""The machine: what its memory, its matrix units and its bus give, since everything else is held against that; and how
long something takes on a device, or on a CPU in dry runs.

Copies are counted as what is read and what is written; matrix products as 2 operations for each multiplication that is
added. Products are of random numbers: of zeros they are faster, since less current flows.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.on_gpu.bench import BF16, COPY, FP8, Bench, data_sheet


class Took(NamedTuple):
    """Seconds of one call, medians."""

    device: float  # between events around it, so with what the device waits for the host in between
    wall: float


def took(call: Callable[[], object], device: torch.device, repeats: int, warm: int = 2, most: float = 5.0) -> Took:
    """Medians over up to `repeats` calls in a row, after `warm` others; no further call once `most` seconds have
    passed. On CUDA the host does not wait between calls, so `wall` is that of back-to-back calls."""
    for _ in range(warm):
        call()
    wait(device)
    if device.type != "cuda":
        walls = _walls(call, repeats, most)
        return Took(statistics.median(walls), statistics.median(walls))
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if time.perf_counter() - began > most:
            break
    torch.cuda.synchronize(device)
    wall = (time.perf_counter() - began) / (len(marks) - 1)
    times = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
    return Took(statistics.median(times), wall)


def _walls(call: Callable[[], object], repeats: int, most: float) -> list[float]:
    walls: list[float] = []
    began = time.perf_counter()
    while len(walls) < repeats and (not walls or time.perf_counter() - began < most):
        start = time.perf_counter()
        call()
        walls.append(time.perf_counter() - start)
    return walls


def graph_seconds(works: Sequence[Callable[[], object]], device: torch.device, replays: int = 20) -> float:
    """Of one of them, the median of replays of all in a graph: no host is in it, for launching takes longer than the
    work. On a CPU: of the first one."""
    for work in works:
        work()
    if device.type != "cuda":
        return took(works[0], device, 3, warm=0).wall
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for work in works:
            work()
    return took(graph.replay, device, replays, warm=1).device / len(works)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives back the memory of what nobody names any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


GB, TERA = 1e9, 1e12


def run(bench: Bench) -> None:
    """Every rate on its own: one that this machine does not have leaves the others."""
    bench.each("machine", (_copy, _bf16, _fp8, _launch))


def _copy(bench: Bench) -> None:
    size = 1 << (20 if bench.tiny else 32)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    seconds = took(lambda: target.copy_(source), bench.device, 12).device
    what = "device to device copy, read and written"
    bench.measured(COPY, what, 2 * size / seconds / GB, "GB/s", _printed(bench, 0, GB))


def _bf16(bench: Bench) -> None:
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = took(lambda: a @ b, bench.device, 20).device
    what = f"bf16 matrix product, {size} x {size} x {size}"
    bench.measured(BF16, what, 2 * size**3 / seconds / TERA, "TFLOP/s", _printed(bench, 1, TERA))


def _fp8(bench: Bench) -> None:
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    right = b.t()  # column-major, as cuBLASLt wants it

    def product() -> Any:
        return torch._scaled_mm(  # noqa: SLF001  # no public name before torch 2.10
            a, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    seconds = took(product, bench.device, 20).device
    what = f"fp8 matrix product, {size} x {size} x {size}"
    bench.measured(FP8, what, 2 * size**3 / seconds / TERA, "TFLOP/s", _printed(bench, 2, TERA))


def _launch(bench: Bench) -> None:
    """What an eager kernel costs where it has nothing to do: the reason for graphs."""
    numbers = torch.zeros(1, device=bench.device)

    def many() -> None:
        for _ in range(1000):
            numbers.add_(1.0)

    wall = took(many, bench.device, 3, warm=1).wall
    bench.measured("machine/launch", "an eager kernel that does nothing", wall * 1e3, "us")


def _printed(bench: Bench, column: int, scale: float) -> float | None:
    """The data sheet's rate."""
    if bench.device.type != "cuda":
        return None
    found = data_sheet(torch.cuda.get_device_name(bench.device), column)
    return found / scale if found else None

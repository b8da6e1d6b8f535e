"""How long something takes on a device, or on a CPU in dry runs."""

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch


class Took(NamedTuple):
    """Seconds of one call, medians."""

    device: float
    """Between events around it, so with what the device waits for the host in between."""
    wall: float


def took(
    call: Callable[[], object], device: torch.device, repeats: int, warm: int = 2, most: float = 5.0
) -> Took:
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


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives back the memory of what nobody names any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

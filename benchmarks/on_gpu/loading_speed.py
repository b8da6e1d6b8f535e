"""How fast a model comes from the page cache to the device: `python -m benchmarks.gpu --only loading`.

plain copy    as many bytes from pinned memory to the device, again and again from one buffer: what the bus gives
reading       the loader's copying, from the first report of its progress to the last
load_model    all of it: configuration, empty model, files, copying
fp8           the same, with weights quantised as they come
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import timed
from benchmarks.on_gpu.bench import Bench, Row
from benchmarks.on_gpu.machine import release, wait
from benchmarks.random_model import SHAPES, bytes_of, write_checkpoint
from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache.codecs import FP8, Codec
from services.executor.model.loading.loader import load_config, load_model

BUFFER = 256 << 20  # bytes of the plain copy's buffer
ROUNDS = 3  # the best of so many counts: the first also makes the files' pages warm


def run(bench: Bench) -> Iterator[Row]:
    """Rows of `loading/...`: of random weights in the shape of a 13B model. A section has its temporary files in shared
    memory."""
    shape = SHAPES["tiny" if bench.tiny else "13b"]
    needed, free = bytes_of(shape), shutil.disk_usage(tempfile.gettempdir()).free
    if free < 1.05 * needed:
        why = f"{tempfile.gettempdir()} has {free / 1e9:.1f} GB free of {needed / 1e9:.1f} that are needed"
        yield Row("loading/load", "loading a 13B", None, note=why)
        return
    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-") as scratch:
        write_checkpoint(Path(scratch), shape)
        yield from _measured(bench.device, Path(scratch))


def _measured(device: torch.device, directory: Path) -> Iterator[Row]:
    total, reading, loading = _best_load(device, directory, None)
    plain = min(_plain_copy(device, total) for _ in range(ROUNDS))
    yield _row("plain", "plain pinned copy of as many bytes", plain, plain, total)
    yield _row("reading", "reading, page cache to device", reading, plain, total)
    yield _row("load", "load_model in all", loading, plain, total)
    _, _, quantizing = _best_load(device, directory, FP8)
    yield _row("load-fp8", "load_model in all, weights to fp8", quantizing, plain, total)


def _row(key: str, what: str, seconds: float, limit: float, total: int) -> Row:
    note = f"{total / 1e9:.2f} GB, {total / seconds / 1e9:.1f} GB/s"
    return Row(f"loading/{key}", what, seconds, "s", limit, limit / seconds, note)


def _best_load(device: torch.device, directory: Path, codec: Codec | None) -> tuple[int, float, float]:
    """(bytes, seconds of reading, seconds in all)"""
    layout = ShardLayout.from_config(load_config(directory), 1, 0)
    found = []
    for _ in range(ROUNDS):
        reports: list[tuple[float, int]] = []

        def told(done: int, total: int, reports: list[tuple[float, int]] = reports) -> None:
            reports.append((time.perf_counter(), total))

        begin = time.perf_counter()
        model = load_model(directory, torch.bfloat16, layout, SingleRank(), device, told, codec)
        wait(device)
        found.append((reports[-1][1], reports[-1][0] - reports[0][0], time.perf_counter() - begin))
        del model
        release(device)
    return found[0][0], min(one[1] for one in found), min(one[2] for one in found)


def _plain_copy(device: torch.device, total: int) -> float:
    """Seconds."""
    size = min(BUFFER, total)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source)
    wait(device)

    def copy() -> None:
        for begin in range(0, total, len(source)):
            count = min(len(source), total - begin)
            target[:count].copy_(source[:count], non_blocking=True)
        wait(device)

    return timed(copy)()

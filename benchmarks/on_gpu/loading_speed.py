"""How fast a model comes from the page cache to the device: `python -m benchmarks.on_gpu.loading_speed`.

plain copy    as many bytes from pinned memory to the device, again and again from one buffer: what the bus gives
reading       the loader's copying, from the first report of its progress to the last
load_model    all of it: configuration, empty model, files, copying
fp8           the same, with weights quantised as they come
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.on_gpu.machine import release
from benchmarks.random_model import SHAPES, LlamaShape, bytes_of, write_checkpoint
from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache.codecs import FP8, Codec
from services.executor.model.loading.loader import load_config, load_model

BUFFER = 256 << 20
"""Bytes of the plain copy's buffer."""
ROUNDS = 3
"""The best of so many counts: the first also makes the files' pages warm."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the page cache itself, on purpose

Row = dict[str, Any]


def loading_speed(device: torch.device, directory: Path | None = None, tiny: bool = False) -> Iterator[Row]:
    """Rows of `loading/...`, each as soon as it is known. `directory`: a model; None: one of random weights in shared
    memory, of the shape of a 13B model, or of one that is tiny."""
    if directory is not None:
        yield from _measured(device, directory)
        return
    shape = SHAPES["tiny" if tiny else "13b"]
    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-", dir=_room_for(shape)) as scratch:
        write_checkpoint(Path(scratch), shape)
        yield from _measured(device, Path(scratch))


def _room_for(shape: LlamaShape) -> Path:
    """Where files for a while go that somebody has named, who clears it away if need be; else shared memory; else
    where such files go by themselves, whose pages stay in memory too. Raises `OSError`."""
    needed = bytes_of(shape)
    usual = Path(tempfile.gettempdir())
    rooms = [usual, SHARED_MEMORY] if "TMPDIR" in os.environ else [SHARED_MEMORY, usual]
    rooms = [path for path in rooms if path.is_dir()]
    for room in rooms:
        if shutil.disk_usage(room).free > 1.05 * needed:
            return room
    names = " and ".join(str(room) for room in rooms)
    raise OSError(f"{names} have no room for {needed / 1e9:.1f} GB; set TMPDIR to a directory that has.")


def _measured(device: torch.device, directory: Path) -> Iterator[Row]:
    total, reading, loading = _best_load(device, directory, None)
    plain = min(_plain_copy(device, total) for _ in range(ROUNDS))
    yield _row("plain", "plain pinned copy of as many bytes", plain, plain, total)
    yield _row("reading", "reading, page cache to device", reading, plain, total)
    yield _row("load", "load_model in all", loading, plain, total)
    _, _, quantizing = _best_load(device, directory, FP8)
    yield _row("load-fp8", "load_model in all, weights to fp8", quantizing, plain, total)


def _row(key: str, what: str, seconds: float, limit: float, total: int) -> Row:
    return {
        "key": f"loading/{key}",
        "what": what,
        "figure": seconds,
        "unit": "s",
        "limit": limit,
        "share": limit / seconds,
        "note": f"{total / 1e9:.2f} GB, {total / seconds / 1e9:.1f} GB/s",
    }


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
        _wait(device)
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
    _wait(device)
    return _timed(lambda: _copy(source, target, total), device)


def _copy(source: torch.Tensor, target: torch.Tensor, total: int) -> None:
    for begin in range(0, total, len(source)):
        count = min(len(source), total - begin)
        target[:count].copy_(source[:count], non_blocking=True)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(
    directory: Annotated[
        Path | None, typer.Argument(help="A model; without one a random 13B is written to shared memory.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu, ...")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="A tiny random model, to see that it runs.")] = False,
) -> None:
    """Loading from the page cache against a plain copy, as JSON."""
    print(json.dumps(list(loading_speed(torch.device(device), directory, tiny)), indent=2))


if __name__ == "__main__":
    typer.run(main)

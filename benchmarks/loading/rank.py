"""One rank of `benchmarks.loading`."""

import mmap
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.random_model import LlamaShape, write_checkpoint
from services.executor.core.sharding import ShardLayout
from services.executor.model.loading.arena import allocate
from services.executor.model.loading.loader import load_config, load_model

CPU = torch.device("cpu")


class Member:
    """A rank that loads and never speaks to the others."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self.busy_seconds = 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        raise NotImplementedError

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def write_random(directory: Path, size: int) -> None:
    """A random bf16 Llama of about `size` bytes."""
    hidden, heads, vocabulary = (2048, 16, 32000) if size > 10**9 // 4 else (256, 4, 1000)
    one = LlamaShape(hidden, heads, heads // 2, hidden * 11 // 4, 1, vocabulary)
    bytes_each = 2 * sum(torch.Size(tensor).numel() for tensor in one.layer.values())
    layers = max(1, round((size - 4 * vocabulary * hidden) / bytes_each))
    write_checkpoint(directory, replace(one, layers=layers))


def copy(directory: Path, total: int, member: Member, pages: str) -> dict[str, float]:
    """Copies `total` bytes of the mapped weight files, from this rank's own place in them, to fresh memory."""
    files = sorted(directory.glob("*.safetensors"))
    begin = time.monotonic()
    held = allocate([((total,), torch.uint8)], CPU)[0] if pages == "huge" else torch.empty(total, dtype=torch.uint8)
    done = 0
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        share = size // member.world_size
        if not (count := min(share, total - done)):
            break
        source = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=share * member.rank)
        held[done : done + count].copy_(source)
        done += count
        del source, mapped
    return {"begin": begin, "end": time.monotonic(), "bytes": done}


def load(directory: Path, member: Member, dtype: torch.dtype, told: Callable[[int, int], None]) -> Any:
    """The rank's share of the model."""
    layout = ShardLayout.from_config(load_config(directory), member.world_size, member.rank)
    return load_model(directory, dtype, layout, member, CPU, told)


def timed_load(directory: Path, member: Member, dtype: torch.dtype) -> dict[str, float]:
    """When the rank's copying began and ended, how much it was, and how long all of it took."""
    reports: list[tuple[float, int, int]] = []
    begin = time.monotonic()
    load(directory, member, dtype, lambda done, total: reports.append((time.monotonic(), done, total)))
    seconds = time.monotonic() - begin
    return {"begin": reports[0][0], "end": reports[-1][0], "bytes": reports[-1][2], "seconds": seconds}


def serve(pipe: Connection, directory: Path, rank: int, world_size: int, threads: int) -> None:
    """Does what `pipe` says, until it says nothing."""
    torch.set_num_threads(threads)
    member, dtype = Member(rank, world_size), torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch:
        write_random(Path(scratch), 10**7)
        load(Path(scratch), member, dtype, lambda done, total: None)  # imports and first uses
    total = int(timed_load(directory, member, dtype)["bytes"])
    while what := pipe.recv():
        pipe.send(timed_load(directory, member, dtype) if what == "load" else copy(directory, total, member, what))

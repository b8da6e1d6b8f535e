"""How long sums over the ranks take by their size: NCCL, and symmetric memory in each of its ways.

It uses as many GPUs of this host as there are, in rings of 1, 2, 4 and 8, one process per rank; with one GPU the same
code runs with world size 1, where nothing is added up and the times are those of the launches. Every sum is checked
before it is timed: the right one, and the same bits on all ranks. Times are of sums in a CUDA graph, as decoding makes
them. `python -m benchmarks.gpu --only collectives` prints the rows.
"""

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.on_gpu.bench import Bench, Row, append_row, read_rows
from benchmarks.on_gpu.machine import graph_seconds
from services.executor.collectives.symmetric_memory import (
    BUFFER_BYTES,
    SharedSums,
    TorchSums,
    Way,
    choose_way,
    with_symmetric_memory,
)
from services.executor.collectives.torch_distributed import TorchDistributed

RINGS = (1, 2, 4, 8)
# Bytes: 8 KiB (one token of a hidden size of 4096 in bf16) to 32 MiB.
SIZES = tuple(8192 << shift for shift in range(0, 13, 2))
TINY_SIZES = (8192, 65536)
IN_GRAPH = 64  # sums of one graph: as many as a step of an 8B model makes
REPLAYS = 20
NOTHING = 1e-8  # seconds below which a sum has launched nothing, as NCCL's over one rank in place
LIMIT = 30.0  # seconds for one ring, its start included


def run(bench: Bench, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """A row for each ring, way and size; a dry run has two ranks over gloo. Raises nothing that a ring can cause: one
    that fails is a row that says so."""
    if bench.tiny or bench.device.type != "cuda":
        return _ring(2, TINY_SIZES, on_gpu=False)
    gpus = torch.cuda.device_count()
    return [row for ranks in RINGS if ranks <= gpus for row in _ring(ranks, sizes, on_gpu=True)]


def _ring(ranks: int, sizes: tuple[int, ...], on_gpu: bool) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="ryzanstein-collectives-") as name:
        directory = Path(name)
        members = [
            context.Process(target=_member, args=(rank, ranks, sizes, on_gpu, directory), daemon=True)
            for rank in range(ranks)
        ]
        for member in members:
            member.start()
        end = time.monotonic() + LIMIT
        for member in members:
            member.join(max(0.0, end - time.monotonic()))
        codes = [member.exitcode for member in members]
        for member in members:
            member.kill()
        rows = read_rows(directory / "rows.jsonl")
    if any(codes) or None in codes:
        note = f"ended early: the ranks' exit codes are {codes} (None: not within {LIMIT:g} s)"
        rows.append(Row(f"collectives/{ranks}/failed", f"a ring of {ranks}", None, note=note, ok=False))
    return rows


def _member(rank: int, ranks: int, sizes: tuple[int, ...], on_gpu: bool, directory: Path) -> None:
    """One rank's process; rank 0 writes each row as soon as it has it."""
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    store = dist.FileStore(str(directory / "store"), ranks)  # type: ignore[attr-defined]
    plain = TorchDistributed.join(backend, store, rank, ranks, device)

    def tell(row: Row) -> None:
        if rank == 0:
            append_row(directory / "rows.jsonl", row)

    note = "world size 1: a launch, and nothing to add" if ranks == 1 else ""
    for size in sizes:
        took = _checked_time(lambda tensor: plain.all_reduce(tensor), size, device, plain)
        tell(_row(ranks, backend, size, took, False, note))
    _symmetric(plain, device, ranks, sizes, tell)
    plain.close()


def _shared_sums(plain: TorchDistributed, device: torch.device, ranks: int) -> tuple[SharedSums | None, str]:
    """Symmetric memory, or why there is none; for a ring of one too, which leaves it out otherwise."""
    made: list[SharedSums] = []

    def make(group: dist.ProcessGroup, device: torch.device) -> SharedSums:
        made.append(TorchSums(group, device))
        return made[0]

    if ranks == 1 and device.type == "cuda":
        try:
            return make(plain.group, device), ""
        except RuntimeError as error:
            return None, str(error).partition("\n")[0]
    with_symmetric_memory(plain, device, one_host=device.type == "cuda", make=make)
    return (made[0], "") if made else (None, "not offered here; the log says why")


def _symmetric(
    plain: TorchDistributed, device: torch.device, ranks: int, sizes: tuple[int, ...], tell: Callable[[Row], None]
) -> None:
    sums, why_not = _shared_sums(plain, device, ranks)
    if sums is None:
        tell(Row(f"collectives/{ranks}/symmetric", "sums in symmetric memory", None, note=why_not))
        return
    ways = [Way.ONE_SHOT, Way.TWO_SHOT] + [Way.MULTIMEM] * (sums.multicast and ranks > 1)
    note = "world size 1: a ring of one leaves this out" if ranks == 1 else ""
    for way in ways:
        for size in sizes:
            if size <= BUFFER_BYTES:
                took = _checked_time(partial(sums.run, way), size, device, plain)
                chosen = choose_way(size, torch.bfloat16, ranks, sums.multicast) is way
                tell(_row(ranks, way.value, size, took, chosen, note))


def _row(ranks: int, way: str, size: int, took: float, chosen: bool, note: str) -> Row:
    rate = f"{size / took / 1e9:.1f} GB/s" if took > NOTHING else "nothing is launched"
    rate += ", what the rule takes" * chosen
    return Row(
        f"collectives/{ranks}/{way.replace(' ', '-')}/{size}",
        f"sum of {size >> 10} KiB over {ranks}, {way}",
        round(took * 1e6, 2),
        "us",
        note=f"{rate}; {note}" if note else rate,
    )


def _checked_time(
    sum_: Callable[[torch.Tensor], object], size: int, device: torch.device, plain: TorchDistributed
) -> float:
    """Seconds of one sum of `size` bytes of bf16. Raises `AssertionError` where it is wrong."""
    tensor = torch.arange(size // 2, device=device).remainder(7).add(plain.rank).to(torch.bfloat16)
    expected = torch.zeros(size // 2, device=device)
    for rank in range(plain.world_size):
        expected += torch.arange(size // 2, device=device).remainder(7) + rank  # small numbers: exact in bf16
    sum_(tensor)
    assert torch.equal(tensor.float(), expected), f"a sum of {size} bytes is wrong on rank {plain.rank}"
    _check_bits(sum_, size, device, plain)
    work = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    return graph_seconds([partial(sum_, work)] * IN_GRAPH, device, REPLAYS)


def _check_bits(
    sum_: Callable[[torch.Tensor], object], size: int, device: torch.device, plain: TorchDistributed
) -> None:
    """All ranks have the same bits of a sum that rounds."""
    numbers = torch.Generator().manual_seed(plain.rank)
    tensor = torch.randn(size // 2, generator=numbers).to(torch.bfloat16).to(device)
    sum_(tensor)
    bits = tensor.view(torch.int16).to(torch.int64)
    weighed = (bits * torch.arange(1, len(bits) + 1, device=device)).sum().reshape(1)
    everybody = torch.zeros(plain.world_size, dtype=torch.int64, device=device)
    everybody[plain.rank] = weighed
    plain.all_reduce(everybody)
    assert len(set(everybody.tolist())) == 1, f"the ranks differ in a sum of {size} bytes"

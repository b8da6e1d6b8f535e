"""What the rank processes of the shared memory tests do."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable

import torch

from services.executor.collectives.shared_memory import SharedArea, SharedMemory
from services.executor.native.library import compiled
from shared.errors import RingLost

MEETING = 60.0
LANES = 2
# Elements; the last ones are more than one piece of float32, or of both.
SIZES = (1, 15, 17, 576, 16 * 576, 32768, 32769, 70001)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
Work = Callable[[SharedMemory], None]


def contribution(operation: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(operation * 64 + rank)
    return (torch.randn(size, generator=generator) * 100).to(dtype)


def expected_sum(operation: int, ranks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """In float32 (integers as they are), in the order of the ranks, rounded once."""
    wide = dtype if dtype is torch.int64 else torch.float32
    total = contribution(operation, 0, size, dtype).to(wide)
    for rank in range(1, ranks):
        total += contribution(operation, rank, size, dtype).to(wide)
    return total.to(dtype)


def many_operations(ring: SharedMemory, count: int = 1500) -> None:
    """Random operations, the same on every rank, each checked to the bit; ranks arrive at random times."""
    plan = random.Random(5)
    own = random.Random(ring.rank)
    for operation in range(count):
        size = plan.choices(SIZES, weights=(8, 8, 8, 8, 4, 1, 1, 1))[0]
        dtype = plan.choice(DTYPES)
        kind = plan.choice(("sum", "sum", "gather", "barrier"))
        for _ in range(own.choice((0, 0, 0, 100, 20_000))):
            pass
        if kind == "sum":
            result = ring.all_reduce(contribution(operation, ring.rank, size, dtype))
            assert torch.equal(result, expected_sum(operation, ring.world_size, size, dtype)), operation
        elif kind == "gather":
            check_gather(ring, operation, dtype, plan)
        else:
            ring.barrier()


def check_gather(ring: SharedMemory, operation: int, dtype: torch.dtype, plan: random.Random) -> None:
    rows = plan.choice((1, 3))
    widths = [plan.choice((0, 1, 5, 999, 50_000)) for _ in range(ring.world_size)]
    wanted = [contribution(operation, rank, rows * width, dtype).view(rows, width) for rank, width in enumerate(widths)]
    parts = ring.gather_to_leader(wanted[ring.rank], widths)
    assert (parts is None) == (ring.rank > 0)
    if parts is not None:
        assert all(torch.equal(part, other) for part, other in zip(parts, wanted, strict=True)), operation


def threads_together(ring: SharedMemory, count: int = 300) -> None:
    """Two threads of each rank add up their parts at once, as C code between two operations does."""
    library = compiled()
    assert library is not None
    for operation in range(count):
        size = SIZES[operation % len(SIZES)]
        values = contribution(operation, ring.rank, size, torch.float32)
        codes: list[int] = []

        def part(thread: int, values: torch.Tensor = values, codes: list[int] = codes) -> None:
            codes.append(
                library.rz_ring_sum_f32_part(
                    ring.handle, values.data_ptr(), values.numel(), thread, LANES, int(MEETING * 1e9)
                )
            )

        others = [threading.Thread(target=part, args=(thread,)) for thread in range(1, LANES)]
        for other in others:
            other.start()
        part(0)
        for other in others:
            other.join()
        assert codes == [0] * LANES
        assert torch.equal(values, expected_sum(operation, ring.world_size, size, torch.float32))


def everything(ring: SharedMemory) -> None:
    many_operations(ring)
    threads_together(ring)
    ring.barrier()
    assert ring.busy_seconds >= ring.waited_seconds > 0


def last_one_dies(ring: SharedMemory) -> None:
    """The last rank is killed between two operations; the others must be told."""
    many_operations(ring, 20)
    if ring.rank == ring.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ring.all_reduce(torch.ones(100_000))
    except RingLost:
        return
    raise AssertionError("a sum without a rank")


def rank_process(work: Work, path: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)  # the ranks are more than the cores
    area = SharedArea.open(path)
    ring = SharedMemory(area, rank, world_size, LANES)
    ring.meet(MEETING)
    work(ring)
    ring.close()
    ring.close()
    sys.exit(0)

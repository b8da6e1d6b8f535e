"""The shared memory collectives: between processes, between threads, and when a rank does not come."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.collectives import shared_memory
from services.executor.collectives.shared_memory import SharedArea, SharedMemory, can_share_memory, make_area
from services.executor.platforms.catalog import choose_platform
from services.executor.worker.rendezvous import choose_backend
from shared.errors import ConfigurationError, RingLost
from tests.forked import CONTEXT, start
from tests.unit.executor.collectives import shm_ranks
from tests.unit.executor.model.lanes import in_lanes

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="no C compiler, or not Linux")


def run_ranks(work: shm_ranks.Work, world_size: int) -> list[int | None]:
    """Exit codes of the ranks."""
    area = make_area(world_size, shm_ranks.LANES)
    ranks = [
        CONTEXT.Process(target=shm_ranks.rank_process, args=(work, area.path, rank, world_size))
        for rank in range(world_size)
    ]
    for process in ranks:
        start(process, computes=True)
    for process in ranks:
        process.join(100)
    area.close()
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("world_size", in_lanes([2, 3], (), [3]))
def test_thousands_of_operations_have_the_same_bits_on_every_rank(world_size: int) -> None:
    assert run_ranks(shm_ranks.everything, world_size) == [0] * world_size


@pytest.mark.slow
def test_the_others_notice_a_killed_rank() -> None:
    assert run_ranks(shm_ranks.last_one_dies, 3) == [0, 0, -signal.SIGKILL]


# --- ranks that are threads of this process ------------------------------------------------------


def between_threads(world_size: int, work: Callable[[SharedMemory], object], timeout: float = 60) -> list[object]:
    area = make_area(world_size, 1)
    rings = [SharedMemory(area, rank, world_size, timeout=timeout) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(work, rings))
    for ring in rings:
        ring.close()
    return results


values = st.floats(width=32, allow_nan=False)


@settings(max_examples=60)
@given(st.lists(st.lists(values, min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 30_000))
def test_sums_of_any_values(rows: list[list[float]], repeat: int) -> None:
    """Infinities, zeros of both signs and denormals too; bf16 rounds once, to nearest even."""
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.tensor(row).to(dtype).repeat(repeat)[: repeat * 5 - 1] for row in rows]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for result in between_threads(len(rows), lambda ring, p=parts: ring.all_reduce(p[ring.rank].clone())):
            assert torch.equal(result.nan_to_num(nan=7), total.to(dtype).nan_to_num(nan=7))  # type: ignore[attr-defined]


def test_nan_stays_nan() -> None:
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        for result in between_threads(2, lambda ring, d=dtype: ring.all_reduce(odd.to(d))):
            assert result.isnan().all()  # type: ignore[attr-defined]


def test_a_rank_that_does_not_come_ends_the_wait_and_the_ring() -> None:
    def work(ring: SharedMemory) -> str:
        if ring.rank == 1:
            return ""
        with pytest.raises(RingLost, match="did not arrive within"):
            ring.all_reduce(torch.zeros(3))
        with pytest.raises(RingLost, match="given up"):
            ring.barrier()
        return "told"

    assert between_threads(2, work, timeout=0.02) == ["told", ""]


def test_abort_ends_every_wait() -> None:
    def work(ring: SharedMemory) -> None:
        if ring.rank == 2:
            ring.abort()
        with pytest.raises(RingLost, match="given up"):
            ring.gather_to_leader(torch.zeros(3, 4), [4, 4, 4])

    between_threads(3, work)


def test_ranks_must_agree_on_the_shape() -> None:
    area = make_area(2, 1)
    with pytest.raises(RingLost, match="shape"):
        SharedMemory(area, 0, 2, lanes=2)
    ring = SharedMemory(area, 0, 2)
    with pytest.raises(RingLost, match="shape"):
        SharedMemory(area, 3, 2)
    ring.close()


def test_the_area_can_be_opened_until_all_have_come_and_by_its_owner_only() -> None:
    area = make_area(2, 1)
    link = str(Path(area.path).readlink())
    assert link.startswith("/memfd:"), "in no directory, so that nothing is left when all ranks are killed"
    assert Path(area.path).stat().st_mode & 0o777 == 0o600
    SharedArea.open(area.path).close()
    area.seal()
    with pytest.raises(RingLost, match="--collectives gloo"):
        SharedArea.open(area.path)
    area.close()
    area.close()
    assert "ryzanstein-ring" not in Path("/proc/self/maps").read_text()


def test_without_the_library_the_user_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "compiled", lambda: None)
    assert not can_share_memory()
    with pytest.raises(ConfigurationError, match="gcc"):
        make_area(2, 1)


@pytest.mark.parametrize(
    ("setting", "device", "can_share", "backend"),
    [
        ("auto", "cuda", True, "nccl"),
        ("auto", "cpu", True, "shm"),
        ("auto", "cpu", False, "gloo"),
        ("gloo", "cpu", True, "gloo"),
        ("shm", "cpu", False, "shm"),
        ("nccl", "cuda", False, "nccl"),
    ],
)
def test_the_backend_that_is_chosen(setting: str, device: str, can_share: bool, backend: str) -> None:
    assert choose_backend(setting, choose_platform(device), lambda: can_share) == backend


@pytest.mark.parametrize(("setting", "device"), [("nccl", "cpu"), ("shm", "cuda")])
def test_a_backend_that_the_device_cannot_have(setting: str, device: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--collectives {setting} works on"):
        choose_backend(setting, choose_platform(device), lambda: True)

"""Sums through symmetric memory: when, how, and what becomes of a ring that cannot. Its kernels need GPUs."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from services.executor.collectives import symmetric_memory as collectives_symmetric
from services.executor.collectives import torch_distributed
from services.executor.collectives.base import SingleRank
from services.executor.collectives.symmetric_memory import (
    BUFFER_BYTES,
    Circumstances,
    SymmetricCollectives,
    TorchSums,
    Way,
    choose_way,
    one_shot_limit,
    why_not,
    with_symmetric_memory,
)
from services.executor.collectives.torch_distributed import TorchDistributed
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.supervisor.ranks.rank_process import NCCL_DEFAULTS, environment
from services.executor.worker import rendezvous
from services.executor.worker.rendezvous import lead
from shared.config import load_settings
from shared.errors import ConfigurationError, RingLost
from tests.unit.executor.model.ring import CPU, ThreadMember, ThreadRing, on_ring

BF16 = torch.bfloat16
KIB = 1024
GOOD = Circumstances(4, one_host=True, operators=True, peers=True)


@pytest.mark.parametrize(
    ("size", "dtype", "ranks", "multicast", "expected"),
    [
        (8 * KIB, BF16, 1, True, Way.NOTHING),
        (8 * KIB, BF16, 4, True, Way.ONE_SHOT),  # 8B, batch 1
        (256 * KIB, BF16, 4, True, Way.ONE_SHOT),  # batch 32
        (512 * KIB, BF16, 4, True, Way.MULTIMEM),
        (512 * KIB, BF16, 4, False, Way.TWO_SHOT),
        (2048 * KIB, BF16, 4, False, Way.NCCL),
        (4096 * KIB, BF16, 4, True, Way.MULTIMEM),
        (1024 * KIB, BF16, 2, False, Way.ONE_SHOT),
        (64 * KIB, BF16, 8, True, Way.ONE_SHOT),
        (128 * KIB, BF16, 8, True, Way.MULTIMEM),
        (8 * KIB, torch.float32, 4, True, Way.ONE_SHOT),
        (8 * KIB, torch.int64, 4, True, Way.NCCL),
        (8 * KIB, torch.float16, 4, True, Way.NCCL),
        (8 * KIB + 4, BF16, 4, True, Way.NCCL),
        (0, BF16, 4, True, Way.NCCL),
        (BUFFER_BYTES + 16, BF16, 4, True, Way.NCCL),
    ],
)
def test_how_a_sum_is_computed(size: int, dtype: torch.dtype, ranks: int, multicast: bool, expected: Way) -> None:
    assert choose_way(size, dtype, ranks, multicast) is expected


@given(st.integers(2, 64))
def test_more_ranks_read_less_each_in_one_shot(ranks: int) -> None:
    assert one_shot_limit(ranks + 1) <= one_shot_limit(ranks)
    assert one_shot_limit(4) == 256 * KIB


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"ranks": 1}, "one rank"),
        ({"one_host": False}, "several hosts"),
        ({"operators": False}, "no symmetric memory"),
        ({"peers": False}, "nvidia-smi topo"),
    ],
)
def test_why_there_is_none(change: dict[str, Any], reason: str) -> None:
    found = why_not(GOOD._replace(**change))
    assert reason in found
    assert bool(found) == bool(change)


class Member(ThreadMember):
    """A member of a ring of threads that says what TorchDistributed says."""

    busy_seconds = 0.0
    group = "the group"

    def __init__(self, ring: ThreadRing, rank: int) -> None:
        super().__init__(ring, rank)
        self.sums = 0
        self.closed = 0

    def measured(self, device: torch.device) -> Any:
        return torch.no_grad()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        return super().all_reduce(tensor)

    def close(self) -> None:
        self.closed += 1


class FakeSums:
    """`SharedSums` over the same ring."""

    def __init__(self, member: Member, multicast: bool = True) -> None:
        self.multicast = multicast
        self._member = member
        self.ways: list[Way] = []
        self.wrong: Way | None = None

    def run(self, way: Way, tensor: Tensor) -> None:
        self.ways.append(way)
        ThreadMember.all_reduce(self._member, tensor)
        if way is self.wrong:
            tensor[-1] += 1


def summing(member: Any, sums: FakeSums) -> Any:
    return with_symmetric_memory(member, CPU, one_host=True, look=lambda *_: GOOD, make=lambda *_: sums)


def on_members(work: Any, ranks: int = 2) -> list[Any]:
    def member(collectives: Any) -> Any:
        return work(Member(collectives._ring, collectives.rank))

    return on_ring(ranks, member)


def test_small_sums_go_through_the_buffer_and_others_through_nccl() -> None:
    def work(member: Member) -> list[Any]:
        sums = FakeSums(member)
        ring = summing(member, sums)
        assert isinstance(ring, SymmetricCollectives)
        assert sums.ways == [Way.ONE_SHOT, Way.ONE_SHOT, Way.MULTIMEM, Way.MULTIMEM], "tried at the start"
        sums.ways.clear()
        before = member.sums
        small = ring.all_reduce(torch.full((4, 1024), 1.0 + member.rank, dtype=BF16))
        odd = ring.all_reduce(torch.full((3,), 1.0 + member.rank, dtype=BF16))
        numbers = ring.all_reduce(torch.tensor([member.rank], dtype=torch.int64))
        large = ring.all_reduce(torch.full((1025, 1024), 1.0 + member.rank, dtype=BF16))
        parts = ring.gather_to_leader(torch.zeros(1, 2), [2, 2])
        ring.barrier()
        ring.close()
        assert (parts is None) == (member.rank == 1)
        assert member.closed == 1
        values = [small.unique().item(), odd.unique().item(), numbers.item(), large.unique().item()]
        return [values, sums.ways, member.sums - before]

    assert on_members(work) == [[[3.0, 3.0, 1, 3.0], [Way.ONE_SHOT, Way.MULTIMEM], 2]] * 2


@pytest.mark.parametrize("fault", ["circumstances", "rendezvous", "interface"])
def test_one_rank_that_cannot_means_that_none_does(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []

    def work(member: Member) -> bool:
        broken = member.rank == 1
        here = GOOD._replace(peers=not (broken and fault == "circumstances"))

        def make(group: Any, device: torch.device) -> FakeSums:
            made.append(member.rank)
            if broken:
                raise (RuntimeError("CUDA driver said no\nmore") if fault == "rendezvous" else TypeError("group"))
            return FakeSums(member)

        ring = with_symmetric_memory(member, CPU, True, look=lambda *_: here, make=make)  # type: ignore[arg-type]
        return ring is member

    assert on_members(work) == [True, True]
    assert sorted(made) == ([] if fault == "circumstances" else [0, 1])


@pytest.mark.parametrize("wrong", [Way.ONE_SHOT, Way.TWO_SHOT])
def test_sums_that_are_wrong_on_one_rank_are_not_used(wrong: Way) -> None:
    def work(member: Member) -> bool:
        sums = FakeSums(member, multicast=False)
        sums.wrong = wrong if member.rank == 1 else None
        ring = summing(member, sums)
        return ring is member

    assert on_members(work) == [True, True]


def test_multicast_counts_where_all_have_it() -> None:
    def work(member: Member) -> bool:
        sums = FakeSums(member, multicast=member.rank == 0)
        ring = summing(member, sums)
        ring.all_reduce(torch.zeros(2 << 20, dtype=BF16))
        return Way.MULTIMEM in sums.ways

    assert on_members(work) == [False, False]


class FakeOperators:
    """`torch.ops.symm_mem` of one rank: a sum over one is the message itself, doubled to be seen."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def one_shot_all_reduce_out(self, part: Tensor, how: str, group: str, out: Tensor) -> None:
        assert (how, group) == ("sum", "g")
        assert out.data_ptr() % 16 == 0
        assert part.data_ptr() != out.data_ptr(), "others read the buffer meanwhile"
        self.called.append("one")
        out.copy_(part * 2)

    def two_shot_all_reduce_(self, part: Tensor, how: str, group: str) -> None:
        self.called.append("two")
        part.mul_(2)

    def multimem_all_reduce_(self, part: Tensor, how: str, group: str) -> None:
        self.called.append("multimem")
        part.mul_(2)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> FakeOperators:
    import torch.distributed._symmetric_memory as symmetric_memory

    fake = FakeOperators()
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda tensor, group: SimpleNamespace(multicast_ptr=7))
    monkeypatch.setattr(collectives_symmetric.torch.ops, "symm_mem", fake, raising=False)
    return fake


def test_a_message_goes_into_the_buffer_and_comes_back_in_place(operators: FakeOperators) -> None:
    group: Any = SimpleNamespace(group_name="g")
    sums = TorchSums(group, CPU)
    assert sums.multicast
    for way in (Way.ONE_SHOT, Way.TWO_SHOT, Way.MULTIMEM):
        for dtype in (BF16, torch.float32):
            tensor = torch.arange(64, dtype=dtype).view(4, 16)
            sums.run(way, tensor)
            assert tensor.tolist() == (torch.arange(64, dtype=dtype).view(4, 16) * 2).tolist()
    assert operators.called == ["one", "one", "two", "two", "multimem", "multimem"]
    shifted = torch.arange(17, dtype=BF16)[1:]
    sums.run(Way.ONE_SHOT, shifted)
    assert shifted.tolist() == [2.0 * value for value in range(1, 17)], "one that is not aligned, too"


def test_a_buffer_that_is_not_mapped_is_refused(operators: FakeOperators, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda tensor, group: None)
    group: Any = SimpleNamespace(group_name="g")
    with pytest.raises(RuntimeError, match="no symmetric memory"):
        TorchSums(group, CPU)


@pytest.fixture
def alone() -> Iterator[TorchDistributed]:
    member = TorchDistributed.join("gloo", HashStore(), 0, 1)
    yield member
    member.close()


def test_a_ring_of_one_says_it_to_itself(alone: TorchDistributed) -> None:
    """The code of a ring, world size 1."""
    tensor = torch.full((4,), 2.0)
    assert alone.all_reduce(tensor) is tensor
    assert tensor.tolist() == [2.0] * 4
    assert [part.tolist() for part in alone.gather_to_leader(torch.ones(1, 2), [2]) or []] == [[[1.0, 1.0]]]
    alone.barrier()
    ring = with_symmetric_memory(alone, CPU, one_host=True)
    assert isinstance(ring, SymmetricCollectives)
    operations = alone.busy_seconds
    assert ring.all_reduce(tensor) is tensor
    assert ring.busy_seconds == operations, "nothing is launched"
    assert ring.gather_to_leader(tensor, [4]) == [tensor]


def test_errors_of_the_ring_and_of_the_gpu_are_told_apart(
    alone: TorchDistributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reason: str) -> Any:
        def all_reduce(*_: object, **__: object) -> None:
            raise RuntimeError(reason)

        return all_reduce

    monkeypatch.setattr(torch.distributed, "all_reduce", fail("Connection closed by peer\nmore"))
    with pytest.raises(RingLost, match=r"is gone \(Connection closed by peer\)"):
        alone.all_reduce(torch.zeros(1))
    monkeypatch.setattr(torch.distributed, "all_reduce", fail("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        alone.all_reduce(torch.zeros(1))


def test_one_rank_meets_nobody_unless_nccl_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(TorchDistributed, "join", lambda *arguments: joined.append(arguments) or "nccl ring")
    spec, gpu = RankSpec(0, 1, "g", "i", 1, "", {}), torch.device("cuda", 0)
    never = pytest.fail
    automatic = load_settings(ExecutorSettings)
    assert isinstance(lead(automatic, spec, gpu, tmp_path, never)[1], SingleRank)  # type: ignore[arg-type]
    asked = load_settings(ExecutorSettings, collectives="nccl")
    assert lead(asked, spec, gpu, tmp_path, never)[1] == "nccl ring"  # type: ignore[arg-type,comparison-overlap]
    [(backend, _, rank, world_size, device)] = joined
    assert (backend, rank, world_size, device) == ("nccl", 0, 1, gpu)
    with pytest.raises(ConfigurationError, match="works on cuda only"):
        lead(asked, spec, CPU, tmp_path, never)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collectives", "backend", "expected"),
    [("auto", "nccl", "symmetric"), ("nccl", "nccl", "plain"), ("auto", "gloo", "plain")],
)
def test_symmetric_memory_is_tried_where_nothing_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, collectives: str, backend: str, expected: str
) -> None:
    monkeypatch.setattr(TorchDistributed, "join", lambda *arguments: "plain")
    monkeypatch.setattr(collectives_symmetric, "with_symmetric_memory", lambda plain, device, one_host: "symmetric")
    settings = load_settings(ExecutorSettings, collectives=collectives, tp=2)
    spec = RankSpec(1, 2, "g", "i", 1, "", {})
    assert rendezvous._join(settings, spec, backend, HashStore(), CPU) == expected  # type: ignore[comparison-overlap]


def test_failures_of_nccl_are_loud_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = environment(2, load_settings(ExecutorSettings))
    assert found["NCCL_DEBUG"] == "INFO"
    assert {name: found[name] for name in NCCL_DEFAULTS if name != "NCCL_DEBUG"} == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
    }


def test_nccl_is_left_without_waiting_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    group: Any = SimpleNamespace(abort=lambda: aborted.append("abort"))
    for name, value in (("get_backend", "nccl"), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: aborted.append("destroy"))
    member = TorchDistributed(group)
    member.close()
    member.close()
    assert aborted == ["abort"]


def test_an_abort_that_never_ends_does_not_keep_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL polls until the graphs that hold its operations are gone, and waits for a device that may be stuck."""
    let_go = threading.Event()
    group: Any = SimpleNamespace(abort=let_go.wait)
    for name, value in (("get_backend", "nccl"), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(torch_distributed, "ABORT_PATIENCE", 0.01)
    closing = threading.Thread(target=TorchDistributed(group).close, daemon=True)
    closing.start()
    closing.join(10)
    left = not closing.is_alive()
    let_go.set()
    assert left

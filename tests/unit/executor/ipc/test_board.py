"""What a ring tells of its work: written by ranks, read by the supervisor, told to Prometheus."""

import time
from bisect import bisect_left
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.executor.collectives.torch_distributed import SAMPLE, CommunicationTime, TorchDistributed
from services.executor.ipc.board import BOUNDS, BoardKind, RingBoard
from services.executor.supervisor.metrics import GpuReader, GpuUse, Labels, RingCollector, vllm_aliases
from shared.messages import GroupLoad
from tests.unit.executor.scheduler.stepped_ring import Ring, ask

GPU = bytes(range(0xF0, 0x100))
OF_GROUP = {"group": "g", "model": "m"}


class OneGpu(GpuReader):
    def read(self, uuid: bytes) -> GpuUse:
        assert uuid == GPU
        return GpuUse(0.25, 1000, None)


def test_a_board_that_is_made_anew_leaves_the_older_one_to_who_has_it(tmp_path: Path) -> None:
    """A thread that followed the ring before still wrote to it, and the process died of a bus error."""
    older = RingBoard(tmp_path / "board", 1, create=True)
    older.rank(0).computes_on(GPU)
    newer = RingBoard(tmp_path / "board", 1, create=True)
    assert (newer.gpus, older.gpus) == ({}, {0: GPU})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(BoardKind)), st.floats(0, 1000))))
def test_each_histogram_has_what_was_observed_and_nothing_of_its_neighbours(
    tmp_path: Path, values: list[tuple[BoardKind, float]]
) -> None:
    ours = RingBoard(tmp_path / "board", 1, create=True)
    ours.rank(0).computes_on(GPU)
    for kind, value in values:
        ours.observe(kind, value)
    for kind in BoardKind:
        mine = [value for of, value in values if of is kind]
        buckets, total = ours.histogram(kind)
        assert [count for _, count in buckets] == [
            *(sum(value <= bound for value in mine) for bound in BOUNDS[kind]),
            len(mine),
        ]
        assert total == pytest.approx(sum(mine))
    assert ours.gpus == {0: GPU}
    assert not any(ours.totals.as_dict().values())


def test_the_bounds_of_a_histogram_grow() -> None:
    for bounds in BOUNDS:
        assert list(bounds) == sorted(set(bounds))
        assert bisect_left(bounds, bounds[-1]) == len(bounds) - 1


def collected(board: RingBoard | None, gpus: GpuReader | None = None) -> dict[str, float]:
    """Values of the group's samples, without the histograms' bounds."""
    collector = RingCollector(lambda: board, lambda: Labels("g", "m"), gpus)
    found = {}
    for metric in collector.collect():
        for sample in metric.samples:
            assert sample.labels.items() >= OF_GROUP.items(), sample
            if "le" not in sample.labels:
                found[sample.name.removeprefix("ryzanstein_executor_")] = sample.value
    return found


def test_a_collector_tells_what_is_on_the_board(tmp_path: Path) -> None:
    board = RingBoard(tmp_path / "board", 2, create=True)
    rank = RingBoard(tmp_path / "board", 2)
    assert collected(None) == {"ring_restarts_total": 0, "ring_deaths_total": 0}
    assert collected(board)["kv_used_ratio"] == 0, "a ring that has no blocks yet"
    rank.rank(1).computes_on(GPU)
    rank.set_load(GroupLoad(running=3, free_blocks=30, total_blocks=40))
    rank.add_step(2_000_000, 10, 3, sequences=5)
    rank.totals.communication_seconds = 0.5
    rank.count_queried(12)
    found = collected(board, OneGpu())
    assert found["kv_used_ratio"] == 0.25
    assert (found["step_duration_seconds_count"], found["step_duration_seconds_sum"]) == (1, 0.002)
    assert (found["batch_size_count"], found["batch_size_sum"]) == (1, 5)
    assert (found["communication_seconds_total"], found["prefix_queried_tokens_total"]) == (0.5, 12)
    assert (found["gpu_utilization_ratio"], found["gpu_memory_used_bytes"]) == (0.25, 1000)
    assert "gpu_memory_bytes" not in found, "the driver did not say"


def test_a_collector_tells_what_computes(tmp_path: Path) -> None:
    board = RingBoard(tmp_path / "board", 1, create=True)
    collector = RingCollector(lambda: board, lambda: Labels("g", "m"), kernels=lambda: "native avx2")
    found = {metric.name: metric for metric in collector.collect()}["ryzanstein_executor_kernels_info"]
    assert [(sample.labels["kernels"], sample.value) for sample in found.samples] == [("native avx2", 1)]
    assert "kernels_info" not in collected(board), "a ring that is starting"


def test_every_alias_has_a_source(tmp_path: Path) -> None:
    board = RingBoard(tmp_path / "board", 1, create=True)
    aliases = vllm_aliases(RingCollector(lambda: board, lambda: Labels("g", "m")))
    found = {metric.name: metric for metric in aliases.collect()}
    assert found.keys() == {alias.name for alias in aliases.aliases}
    assert found["vllm:num_requests_running"].samples[0].labels == {"group": "g", "model_name": "m"}


def test_without_a_driver_nothing_is_known_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert GpuReader().read(GPU) == GpuUse(None, None, None)


class Driver:
    """pynvml with one device, which is a part of a GPU or a whole one."""

    class NVMLError(Exception):
        pass

    def __init__(self, name: str) -> None:
        self._name = name

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802  # NVIDIA's
        if name != self._name:
            raise self.NVMLError
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> object:  # noqa: N802
        return type("Memory", (), {"used": 5, "total": 10})

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> object:  # noqa: N802
        if handle.startswith("MIG"):
            raise self.NVMLError
        return type("Rates", (), {"gpu": 50})


@pytest.mark.parametrize(
    ("kind", "expected"), [("GPU", GpuUse(0.5, 5, 10)), ("MIG", GpuUse(None, 5, 10)), ("X", GpuUse(None, None, None))]
)
def test_a_gpu_is_found_by_its_uuid(kind: str, expected: GpuUse) -> None:
    reader = GpuReader()
    reader._tried, reader._nvml = True, Driver(f"{kind}-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff")
    assert reader.read(GPU) == expected


# --- stages ----------------------------------------------------------------------------------------


class Observed:
    """What a batcher tells of the stages."""

    def __init__(self, ring: Ring) -> None:
        self.values: list[tuple[BoardKind, float]] = []
        self.queried = 0
        ring.batcher._stages._board = self

    def observe(self, kind: BoardKind, value: float) -> None:
        self.values.append((kind, value))

    def count_queried(self, tokens: int) -> None:
        self.queried += tokens


def step(ring: Ring, begins: float, seconds: float) -> None:
    planned = ring.batcher.schedule(begins)
    plan, rows = planned
    ring.take(ring.batcher.update(ring.engine.execute(plan, [row.sampling for row in rows]), seconds))


def test_the_stages_of_a_request_follow_each_other() -> None:
    ring = Ring(tokens=8, sequences=1)
    told = Observed(ring)
    ring.batcher.add(ask("a", 12, max_tokens=3), 10.0)
    ring.batcher.add(ask("b", 4, max_tokens=1), 10.0)
    step(ring, 10.5, 1.0)  # eight tokens of the prompt
    assert told.values == [(BoardKind.QUEUE, 0.5)]
    step(ring, 12.0, 1.0)  # the others, and the first token
    assert told.values[1:] == [(BoardKind.PREFILL, 2.5)]
    step(ring, 13.0, 0.5)
    step(ring, 14.0, 0.5)
    assert told.values[2:] == [(BoardKind.DECODE, 1.5)]
    step(ring, 20.0, 0.25)  # the one that has waited: its first token is its last
    assert told.values[3:] == [(BoardKind.QUEUE, 10.0), (BoardKind.PREFILL, 0.25)]
    assert told.queried == 16


def test_a_sequence_that_gives_up_its_place_waits_once() -> None:
    ring = Ring(sequences=1)
    told = Observed(ring)
    ring.batcher.add(ask("b", 4, max_tokens=3, lane="batch"), 1.0)
    step(ring, 2.0, 0.0)
    ring.batcher.add(ask("i", 4, max_tokens=2), 3.0)
    for at in range(3, 8):
        if ring.batcher.has_work:
            step(ring, at, 0.0)
    assert ring.batcher.preemptions == 1
    assert sorted(kind for kind, _ in told.values) == sorted(
        [*2 * [BoardKind.QUEUE, BoardKind.PREFILL, BoardKind.DECODE]]
    )


# --- communication ---------------------------------------------------------------------------------


def test_time_in_collectives_is_counted_and_no_other() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        ring = TorchDistributed(dist.group.WORLD)
        assert ring.busy_seconds == 0
        began = time.perf_counter()
        ring.all_reduce(torch.ones(4))
        ring.gather_to_leader(torch.ones(2, 2), [2])
        spent = ring.busy_seconds
        assert 0 < spent <= time.perf_counter() - began
        assert ring.busy_seconds == spent
    finally:
        dist.destroy_process_group()


class FakeEvent:
    """An event of CUDA on a clock that moves a millisecond with each record; it has happened when that is said."""

    now = 0.0
    happened = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.happened

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


def test_one_operation_on_a_gpu_stands_for_seventeen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    spent, gpu = CommunicationTime(), torch.device("cuda", 0)
    for _ in range(5 * SAMPLE):
        with spent.measured(gpu):
            pass
    assert spent.seconds == 0, "nothing is waited for"
    FakeEvent.happened = True
    assert spent.seconds == pytest.approx(5 * SAMPLE * 1e-3)
    assert spent.seconds == pytest.approx(5 * SAMPLE * 1e-3), "read once"


def test_nothing_is_asked_of_events_within_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("an event was made"))
    spent, gpu = CommunicationTime(), torch.device("cuda", 0)
    for _ in range(2 * SAMPLE):
        with spent.measured(gpu):
            pass
    assert spent.seconds == 0

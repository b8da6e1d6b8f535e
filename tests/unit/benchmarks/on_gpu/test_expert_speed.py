"""A layer of experts is found right on the CPU, where the kernels are interpreted, and a wrong one is found out."""

import pytest

pytest.importorskip("triton", reason="the GPU's parts are checked where Triton is")

from benchmarks.on_gpu import expert_speed
from tests.unit.benchmarks.on_gpu.bench_on_cpu import LimitedBench, dry_bench


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_speed, "FORMS", ("fp8",))
    monkeypatch.setattr(expert_speed, "BATCHES", 1)


def test_a_layer_is_right_and_measured() -> None:
    rows = {row.key: row for row in expert_speed.run(dry_bench(kind=LimitedBench))}
    assert list(rows) == [f"experts/{what}/fp8/{count}" for count in (1, 5) for what in ("right", "speed")]
    assert rows["experts/right/fp8/1"].ok
    assert rows["experts/right/fp8/5"].ok
    assert rows["experts/speed/fp8/5"].unit == "GB/s"
    assert 0 < (rows["experts/speed/fp8/5"].share or 0) < 1


def test_a_layer_that_is_off_by_five_hundredths_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_speed._Layer._expected
    monkeypatch.setattr(expert_speed._Layer, "_expected", lambda layer, x: 1.05 * real(layer, x))
    rows = list(expert_speed.run(dry_bench()))
    assert [row.ok for row in rows if "/right/" in row.key] == [False, False]

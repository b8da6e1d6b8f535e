"""A layer of experts is found right on the CPU, where the kernels are interpreted, and a wrong one is found out."""

import pytest

pytest.importorskip("triton", reason="the GPU's parts are checked where Triton is")

from benchmarks.on_gpu import expert_cases
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cases, "FORMS", ("fp8",))


def test_a_layer_is_right() -> None:
    rows = list(expert_cases.errors(dry_bench()))
    assert [row.key for row in rows] == ["experts/fp8/1", "experts/fp8/5"]
    assert all(row.ok for row in rows)


def test_a_layer_that_is_off_by_five_hundredths_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_cases._Layer._expected
    monkeypatch.setattr(expert_cases._Layer, "_expected", lambda layer, x: 1.05 * real(layer, x))
    assert [row.ok for row in expert_cases.errors(dry_bench())] == [False, False]

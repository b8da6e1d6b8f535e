"""Adapters of a product are found right on the CPU, where the kernels are interpreted."""

import pytest

pytest.importorskip("triton", reason="the GPU kernels are interpreted where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.adapter_speed import run
from tests.unit.benchmarks.on_gpu.bench_on_cpu import LimitedBench, dry_bench


def test_adapters_are_right_and_timed() -> None:
    rows = {row.key: row for row in run(dry_bench(kind=LimitedBench))}
    assert list(rows) == [f"adapters/{what}/5/{count}" for count in (1, 9) for what in ("right", "speed")]
    assert rows["adapters/right/5/1"].ok
    assert rows["adapters/right/5/9"].ok
    assert 0 < (rows["adapters/speed/5/9"].share or 0) < 1

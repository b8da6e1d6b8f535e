"""Adapters of a product are found right on the CPU, where the kernels are interpreted."""

import pytest

pytest.importorskip("triton", reason="the GPU kernels are interpreted where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.adapter_cases import errors
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


def test_adapters_are_right() -> None:
    rows = list(errors(dry_bench()))
    assert [row.key for row in rows] == ["adapters/5/1", "adapters/5/9"]
    assert all(row.ok for row in rows)

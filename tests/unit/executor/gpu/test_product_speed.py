"""The measurement of products runs, if without a GPU in the interpreter."""

import pytest

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.product_speed import run
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


def test_each_way_is_measured() -> None:
    rows = list(run(dry_bench()))
    assert {row.key for row in rows} >= {
        "products/tiny/1/bf16",
        "products/tiny/1/bf16, our own",
        "products/tiny/3/fp8, widened in registers",
        "products/tiny/17/int8, widened in registers",
        "products/tiny/1/int4",
        "products/tiny/3/q4_k",
    }
    assert all(row.figure for row in rows)

"""Sparse attention is found right on the CPU, where the kernels are interpreted, and wrong where it is."""

import pytest

pytest.importorskip("triton", reason="the GPU kernels are interpreted where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.sparse_speed import errors, run
from services.executor.gpu.kernels import pages
from tests.unit.benchmarks.on_gpu.bench_on_cpu import LimitedBench, dry_bench


def test_sparse_attention_is_right_and_timed_beside_dense() -> None:
    rows = {row.key: row for row in run(dry_bench(kind=LimitedBench))}
    assert list(rows) == [f"sparse/{what}/90" for what in ("right", "dense", "sparse", "times")]
    assert rows["sparse/right/90"].ok
    assert 0 < (rows["sparse/sparse/90"].limit or 0) < (rows["sparse/dense/90"].limit or 0)


def test_wrong_pages_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pages.choose
    monkeypatch.setattr(pages, "choose", lambda *asked: chosen(*asked).clamp(max=9))
    assert [row.ok for row in errors(dry_bench())] == [False]

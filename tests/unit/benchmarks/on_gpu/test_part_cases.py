"""Each part is found right on the CPU, where the kernels are interpreted, and a wrong one is found out."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's parts are checked where Triton is")

from benchmarks.on_gpu import part_cases
from benchmarks.on_gpu.bench import Bench, Row, read_rows
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


def bench_of(path: Path) -> Bench:
    return dry_bench(path / "rows.jsonl")


def rows_of(bench: Bench) -> list[Row]:
    return read_rows(bench.rows)


def test_products_are_right(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    part_cases.products(bench)
    assert len(rows_of(bench)) == 1 + 6 * 3
    assert all(row.ok and row.figure for row in rows_of(bench))


def test_a_product_that_is_off_by_three_hundredths_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its scale, which no rounding is."""
    from services.executor.gpu import quantized_matmul

    real = quantized_matmul.coded_product
    monkeypatch.setattr(
        quantized_matmul,
        "coded_product",
        lambda weight, *rest: real(weight._replace(scales=weight.scales * 1.03), *rest),
    )
    bench = bench_of(tmp_path)
    part_cases.products(bench)
    assert {row.key.split("/")[2] for row in rows_of(bench) if not row.ok} == {"fp8", "int8"}
    assert sum(not row.ok for row in rows_of(bench)) == 6


def test_blocks_and_loading_are_right(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    part_cases.blocks(bench)
    part_cases.loading(bench)
    assert [row.key for row in rows_of(bench)] == [
        "correctness/blocks/int8",
        "correctness/blocks/fp8",
        "correctness/loading/bf16",
        "correctness/loading/fp8",
    ]
    assert all(row.ok and row.figure == 0 for row in rows_of(bench))


def test_a_tensor_that_was_loaded_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = part_cases._loaded

    def loaded(*args: object) -> torch.nn.Module:
        model = real(*args)  # type: ignore[arg-type]
        model.get_parameter("model.norm.weight").data[3] += 1
        return model

    monkeypatch.setattr(part_cases, "_loaded", loaded)
    bench = bench_of(tmp_path)
    part_cases.loading(bench)
    assert [(row.ok, row.figure, row.note) for row in rows_of(bench)] == [
        (False, 1.0, "of 21: model.norm.weight")
    ] * 2


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: Bench) -> None:
        raise ValueError("no such kernel")

    for name in ("products", "experts", "adapters", "sums"):
        fails.__name__ = name
        monkeypatch.setattr(part_cases, name, fails)
    bench = bench_of(tmp_path)
    part_cases.run(bench)
    assert [row.ok for row in rows_of(bench)] == [False] * 3 + [True] * 5 + [False]

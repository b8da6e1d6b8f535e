"""Each check of a run is right on the CPU, where kernels are interpreted, and sees what is wrong; each measurement
runs."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's parts are checked where Triton is")

from benchmarks.on_gpu import (
    correctness,
    expert_cases,
    kernel_cases,
    kernel_shard,
    part_cases,
    product_speed,
    sparse_speed,
    training_speed,
)
from benchmarks.on_gpu.bench import Bench, Row, read_rows
from benchmarks.on_gpu.kernel_shard import TINY_CASES, chosen, run_shards
from services.executor.gpu import quantized_matmul
from services.executor.gpu.kernels import attention_launch, pages
from tests.unit.benchmarks.on_gpu.bench_on_cpu import LimitedBench, dry_bench

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return dry_bench(tmp_path / "rows.jsonl", LimitedBench)


def told(bench: Bench, check: Callable[[Bench], Iterable[Row] | None]) -> dict[str, Row]:
    """What `check` says, by key."""
    return {row.key: row for row in check(bench) or read_rows(bench.rows)}


@pytest.fixture(autouse=True)
def one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cases, "FORMS", ("fp8",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "keys"),
    [
        (part_cases.adapters, {"correctness/adapters/5/1", "correctness/adapters/5/9"}),
        (part_cases.experts, {"correctness/experts/fp8/1", "correctness/experts/fp8/5"}),
        (sparse_speed.run, {f"sparse/{what}/90" for what in ("right", "dense", "sparse", "times")}),
        (part_cases.blocks, {"correctness/blocks/int8", "correctness/blocks/fp8"}),
        (part_cases.loading, {"correctness/loading/bf16", "correctness/loading/fp8"}),
        (part_cases.products, {"correctness/products/fp8/3"}),
        (training_speed.run, {"training/tiny/int4/tokens", "training/tiny/int4/projected"}),
        (
            product_speed.run,
            {
                *("products/tiny/1/bf16", "products/tiny/1/bf16, our own", "products/tiny/1/int4"),
                *("products/tiny/3/fp8, widened in registers", "products/tiny/3/q4_k"),
                "products/tiny/17/int8, widened in registers",
            },
        ),
    ],
    ids=lambda given: getattr(given, "__module__", "").rpartition(".")[2] or None,
)
def test_what_is_right_is_found_right(
    bench: Bench, check: Callable[[Bench], Iterable[Row] | None], keys: set[str]
) -> None:
    rows = told(bench, check)
    assert keys <= rows.keys()
    assert all(row.ok and row.figure is not None for row in rows.values())


def wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """By three hundredths of its scale, which no rounding is."""
    real = quantized_matmul.coded_product
    scaled = lambda weight, *rest: real(weight._replace(scales=weight.scales * 1.03), *rest)  # noqa: E731
    monkeypatch.setattr(quantized_matmul, "coded_product", scaled)


def wrong_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_cases._Layer._expected
    monkeypatch.setattr(expert_cases._Layer, "_expected", lambda layer, x: 1.05 * real(layer, x))


def wrong_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages.choose
    monkeypatch.setattr(pages, "choose", lambda *asked: real(*asked).clamp(max=9))


def wrong_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    real = part_cases._loaded

    def loaded(*args: object) -> torch.nn.Module:
        model = real(*args)  # type: ignore[arg-type]
        model.get_parameter("model.norm.weight").data[3] += 1
        return model

    monkeypatch.setattr(part_cases, "_loaded", loaded)


@pytest.mark.parametrize(
    ("plant", "check", "wrong"),
    [
        (wrong_product, part_cases.products, 6),
        (wrong_expert, expert_cases.errors, 2),
        (wrong_pages, sparse_speed.errors, 1),
        (wrong_loading, part_cases.loading, 2),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_what_is_wrong_is_found_wrong(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Bench], Iterable[Row] | None],
    wrong: int,
) -> None:
    plant(monkeypatch)
    assert sum(not row.ok for row in told(bench, check).values()) == wrong


@pytest.mark.slow
def test_a_model_that_attends_to_too_few_keys_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one key: the last block's first one."""
    assert correctness._logit_error("llama", CPU) < correctness.LOGITS
    real = attention_launch.attend

    def short(
        query: torch.Tensor, layer: attention_launch.AttentionLayer, batch: attention_launch.Batch, *rest: object
    ) -> None:
        real(query, layer, batch._replace(context_lens=(batch.context_lens - 1).clamp(min=1)), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_launch, "attend", short)
    assert correctness._logit_error("llama", CPU) > 10 * correctness.LOGITS


@pytest.mark.parametrize(("noise", "verdicts"), [(1.0, [True, True]), (1.5, [True, False]), (60.0, [False, False])])
def test_a_bf16_model_is_judged_by_transformers_own(bench: Bench, noise: float, verdicts: list[bool]) -> None:
    bench.tiny = False
    generator = torch.Generator().manual_seed(1)
    true = torch.randn((2048, 256), generator=generator)
    errors = torch.randn((2, 2048, 256), generator=generator) * 0.01
    correctness._judge(bench, "a model", true, true + noise * errors[0], true + errors[1])
    assert [row.ok for row in read_rows(bench.rows)] == verdicts


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str, *, fails: bool = True) -> None:
        def run(bench: Bench) -> None:
            if fails:
                raise ValueError("no such kernel")

        run.__name__ = name
        monkeypatch.setattr(part_cases, name, run)

    failing = ("products", "experts", "adapters", "sparse", "loading", "sums")
    for name in failing:
        part(name)
    part("blocks", fails=False)
    part_cases.run(bench)
    rows = {row.key: row.ok for row in read_rows(bench.rows)}
    assert rows == {f"correctness/{name}": False for name in failing}


# --- attention's cases in several processes ----------------------------------------------------


@pytest.mark.slow
def test_every_case_is_checked_once() -> None:
    found = run_shards(2, tiny=True, seconds=60.0)
    assert found.ended == []
    assert {one.key for one in found.checked} == {str(case) for case in chosen(tiny=True)}
    assert len(found.checked) == TINY_CASES
    assert all(one.ok and one.figure is not None and 0 <= one.figure < 1 for one in found.checked)


def run_part(monkeypatch: pytest.MonkeyPatch, out: Path, seconds: str) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_shard", "0", "1", seconds, str(out), "--tiny"])
    kernel_shard.main()


def test_a_part_without_time_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no time was left"):
        run_part(monkeypatch, tmp_path / "0.jsonl", "-1")
    assert read_rows(tmp_path / "0.jsonl") == []


def test_a_case_that_is_wrong_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = chosen(tiny=True)[0]

    def check(case: kernel_cases.Case, device: object) -> float:
        if case == first:
            raise kernel_cases.Wrong("attention is off")
        return 0.5

    monkeypatch.setattr(kernel_cases, "check", check)
    run_part(monkeypatch, tmp_path / "0.jsonl", "60")
    found = [(one.ok, one.note) for one in read_rows(tmp_path / "0.jsonl")]
    assert found == [(False, "attention is off")] + [(True, "")] * (TINY_CASES - 1)

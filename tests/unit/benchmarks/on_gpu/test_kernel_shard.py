"""Attention's cases in several processes, on the CPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="attention's kernels are checked where Triton is")

from benchmarks.on_gpu import kernel_shard
from benchmarks.on_gpu.bench import read_rows
from benchmarks.on_gpu.kernel_shard import TINY_CASES, chosen, run_shards


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
    from benchmarks.on_gpu import kernel_cases

    first = chosen(tiny=True)[0]

    def check(case: kernel_cases.Case, device: object) -> float:
        if case == first:
            raise kernel_cases.Wrong("attention is off")
        return 0.5

    monkeypatch.setattr(kernel_cases, "check", check)
    run_part(monkeypatch, tmp_path / "0.jsonl", "60")
    found = read_rows(tmp_path / "0.jsonl")
    assert [(one.ok, one.note) for one in found] == [(False, "attention is off")] + [(True, "")] * (
        TINY_CASES - 1
    )

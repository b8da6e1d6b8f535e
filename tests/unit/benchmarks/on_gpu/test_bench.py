"""What a section says of its cases."""

from pathlib import Path

import pytest

from benchmarks.on_gpu.bench import read_rows, told
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


def caught(error: Exception) -> Exception:
    try:
        raise error
    except Exception as found:
        return found
    raise AssertionError


def test_an_error_is_told_with_the_places_it_came_through() -> None:
    words = told(caught(ValueError("too small\nby far")))
    here = Path(__file__).name
    assert words.startswith(f"ValueError: too small ({here}:")
    assert told(caught(ValueError())).startswith("ValueError: no words")


def test_a_case_that_fails_leaves_a_row_and_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = dry_bench(tmp_path / "rows.jsonl")
    bench.failed("a/b", "a case", caught(ValueError("too small")))
    bench.failed("a/c", "a check", caught(ValueError("wrong")), wrong=True)
    assert [(row.key, row.figure, row.ok) for row in read_rows(bench.rows)] == [
        ("a/b", None, True),
        ("a/c", None, False),
    ]
    assert "Traceback" in capsys.readouterr().err


def test_a_gpu_that_is_lost_ends_the_section(tmp_path: Path) -> None:
    """Every case after it would fail too, and say nothing."""
    bench = dry_bench(tmp_path / "rows.jsonl")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.failed("a/b", "a case", caught(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert [row.key for row in read_rows(bench.rows)] == ["a/b"]

"""Sections as processes: those that do their work, that fail, that hang, and that take everything with them."""

import json
import os
import sys
from itertools import count
from pathlib import Path

import pytest

from benchmarks.on_gpu.bench import Report, read_report, read_rows
from benchmarks.on_gpu.running import Runner
from benchmarks.on_gpu.sections import Section

ROW = json.dumps({"key": "a/b", "what": "a row", "figure": 1.5, "unit": "GB/s"})
WRITE = f"import sys; file = open(sys.argv[1], 'a'); file.write({ROW!r} + chr(10)); file.flush();"
CODES = {
    "fine": WRITE,
    "fails": WRITE + "raise ValueError('the kernel is wrong')",
    "hangs": WRITE + "sys.stderr.write('here it hangs' + chr(10)); sys.stderr.flush(); sys.stdin = None;"
    "import threading; threading.Event().wait()",
    "dies": WRITE + "import os; os.kill(os.getpid(), 9)",
    "ends": WRITE + "import os; os._exit(3)",
    "litters": "import os, sys, tempfile; open(sys.argv[2], 'w').write(tempfile.mkdtemp()); os.kill(os.getpid(), 9)",
    # Each end of a pipe opens when the other does.
    "left": WRITE + "open(sys.argv[2], 'w').close()",
    "right": WRITE + "open(sys.argv[2]).close()",
    "half": WRITE + 'file.write(\'{"key": "cut\'); file.flush()',
}


def run(names: list[str], path: Path, budget: float = 60.0, most: float = 30.0) -> tuple[Report, list[str]]:
    report = Report("2026-01-01", "command", True, budget, {"card": "none"}, [])
    said: list[str] = []

    def command(section: Section, rows: Path, limit: float) -> list[str]:
        return [sys.executable, "-c", CODES[section.name], str(rows), str(path.with_name("pipe"))]

    sections = [Section(name, "a title", most, 0.1, beside=name in ("left", "right")) for name in names]
    Runner(report, path, command, said.append).run(sections)
    return report, said


def test_rows_come_from_every_section_and_are_written(tmp_path: Path) -> None:
    report, said = run(["fine", "fine"], tmp_path / "r.json")
    assert [section.status for section in report.sections] == ["done", "done"]
    assert read_report(tmp_path / "r.json") == report
    row = report.row("a/b")
    assert row is not None
    assert row.figure == 1.5
    assert any("done, 1 rows" in line for line in said)


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("fails", "failed", "ValueError: the kernel is wrong"),
        ("dies", "failed", "killed by signal 9 (SIGKILL), without a word"),
        ("ends", "failed", "ended with 3, without a word"),
    ],
)
def test_a_section_that_fails_leaves_its_rows_and_why(name: str, status: str, error: str, tmp_path: Path) -> None:
    report, _ = run([name, "fine"], tmp_path / "r.json")
    first, second = report.sections
    assert (first.status, first.error[-1], len(first.rows)) == (status, error, 1)
    assert second.status == "done"


@pytest.mark.slow
def test_a_section_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    report, _ = run(["hangs", "fine"], tmp_path / "r.json", most=2.0)
    first, second = report.sections
    assert (first.status, first.error[-1:]) == ("timed out", ["here it hangs"])
    assert [row.key for row in first.rows] == ["a/b"]
    assert second.status == "done"


def test_nothing_stays_of_a_section_that_was_killed(tmp_path: Path) -> None:
    run(["litters"], tmp_path / "r.json")
    left = Path((tmp_path / "pipe").read_text())
    assert left.is_absolute()
    assert not left.exists()


def test_sections_that_measure_no_time_run_at_the_same_time(tmp_path: Path) -> None:
    """Neither ends before the other has begun."""
    os.mkfifo(tmp_path / "pipe")
    report, _ = run(["left", "right", "fine"], tmp_path / "r.json")
    assert [section.status for section in report.sections] == ["done"] * 3
    assert read_report(tmp_path / "r.json") == report


def test_what_sections_say_of_errors_is_kept_whole(tmp_path: Path) -> None:
    run(["fails", "fine"], tmp_path / "r.json")
    log = (tmp_path / "r.errors.log").read_text()
    assert log.startswith("== fails\nTraceback (most recent call last)")
    assert log.endswith("ValueError: the kernel is wrong\n== fine\n")


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    report, _ = run(["half"], tmp_path / "r.json")
    assert [row.key for row in report.sections[0].rows] == ["a/b"]


def test_a_section_for_which_no_time_is_left_is_named(tmp_path: Path) -> None:
    ticks = count(0.0, 100.0)
    report = Report("2026-01-01", "command", True, 60.0, {}, [])
    runner = Runner(
        report,
        tmp_path / "r.json",
        lambda section, rows, limit: [sys.executable, "-c", ""],
        lambda text: None,
        clock=lambda: next(ticks),
    )
    runner.run([Section("late", "", 30, 10)])
    assert report.sections[0].status == "skipped"
    assert report.sections[0].error == ["0 s were left, and it needs 10"]


def test_other_files_are_not_taken_for_reports(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a results file"):
        read_report(tmp_path / "r.json")

"""What is kept of how long tests take, lane by lane."""

import json
from pathlib import Path

import pytest

from tests.durations import SLOWEST, Durations, kept, table


class Terminal:
    """What of pytest's reporter is used."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def ended(durations: Durations, names: list[str], lane: str, seconds: float) -> None:
    for name in names:
        for phase in ("setup", "call", "teardown"):
            durations.pytest_runtest_logreport(
                pytest.TestReport(name, (name, 1, name), {lane: 1}, "passed", None, phase, duration=seconds / 3)
            )


def shown(durations: Durations) -> list[str]:
    terminal = Terminal()
    durations.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    return terminal.lines


MANY = [f"tests/unit/test_a.py::test_{number}" for number in range(SLOWEST)]


def test_a_lane_is_kept_until_it_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "build" / "durations.json"
    for lane, seconds in (("unmarked", 3), ("slow", 6), ("unmarked", 9)):
        durations = Durations(file)
        ended(durations, [*MANY, f"tests/unit/test_b.py::test_{seconds}"], lane, seconds)
        assert len(shown(durations)) == 1 + SLOWEST
    lanes = kept(file)
    assert {lane: set(seconds.values()) for lane, seconds in lanes.items()} == {"fast": {9.0}, "slow": {6.0}}
    assert "tests/unit/test_b.py::test_3" not in lanes["fast"]


def test_one_run_of_both_lanes_keeps_both(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "durations.json")
    ended(durations, MANY, "slow", 1)
    ended(durations, ["tests/unit/test_b.py::test_b"], "unmarked", 60)
    assert shown(durations)[1] == "    60.0 s  tests/unit/test_b.py::test_b"
    assert {lane: len(seconds) for lane, seconds in kept(tmp_path / "durations.json").items()} == {
        "fast": 1,
        "slow": SLOWEST,
    }


@pytest.mark.parametrize(("tests", "whole"), [(MANY[:-1], True), ([*MANY, "one more"], False)])
def test_a_part_of_a_lane_is_not_kept(tmp_path: Path, tests: list[str], whole: bool) -> None:
    """Tests that failed and run again, a file, a folder."""
    durations = Durations(tmp_path / "durations.json", whole=whole)
    ended(durations, tests, "unmarked", 1)
    assert bool(shown(durations)) != whole
    assert kept(tmp_path / "durations.json") == {}


def test_the_table_tells_the_lanes_apart(tmp_path: Path) -> None:
    lanes = {"fast": {"tests/unit/a.py::a": 1.5, "tests/unit/b.py::b": 2.0}, "slow": {"tests/e2e/c.py::c": 30.0}}
    (tmp_path / "durations.json").write_text(json.dumps(lanes))
    assert [*table(kept(tmp_path / "durations.json"), 2, 1)] == [
        "     3.5 s      2  fast tests, one after the other",
        "     3.5 s      2  tests/unit",
        "",
        "     2.0 s  tests/unit/b.py::b",
        "",
        "    30.0 s      1  slow tests, one after the other",
        "    30.0 s      1  tests/e2e",
        "",
        "    30.0 s  tests/e2e/c.py::c",
        "",
    ]

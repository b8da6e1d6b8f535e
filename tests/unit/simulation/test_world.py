"""Processes, machines and networks of a world do what those of the real one do; a seed gives one run."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.simulation.core.trace import Mark, parted
from tests.unit.simulation import seen


def run(seed: int, *names: str, **environment: str) -> dict[str, Any]:
    """What these worlds saw, run in a fresh process."""
    command = [sys.executable, "-m", "tests.unit.simulation.worlds", str(seed), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    return run(2, *seen.EXPECTED, "killed_writers_leave_what_was_written_or_its_beginning")


@pytest.mark.parametrize("name", seen.EXPECTED)
def test_a_world_shows(name: str, worlds: dict[str, Any]) -> None:
    assert worlds[name] == seen.EXPECTED[name]


def test_a_killed_writer_leaves_what_it_wrote_or_the_beginning_of_it(worlds: dict[str, Any]) -> None:
    ends = worlds["killed_writers_leave_what_was_written_or_its_beginning"]
    assert all(begins for begins, _, _ in ends)
    assert all(heard == 30 for _, heard, told in ends if told == ["end"])
    reset = [heard for _, heard, told in ends if told == ["ConnectionResetError"]]
    assert min(reset) < 10 < max(reset) < 30
    assert len(reset) < len(ends) == 40


def test_a_seed_is_one_run_in_each_process() -> None:
    one, again, other = run(3, "digest"), run(3, "digest", PYTHONHASHSEED="7"), run(4, "digest")
    assert one == again
    assert one["digest"] != other["digest"]
    assert one["digest"]["count"] > 500
    assert one["digest"]["failures"] == 0


def test_where_two_runs_part_is_said() -> None:
    one = [Mark(1, 1.0, "a"), Mark(2, 2.0, "b"), Mark(3, 3.0, "c")]
    assert parted(one, one[:2]) is None
    assert parted(one, [one[0], Mark(2, 2.5, "x")]) == (1.0, 2.5)

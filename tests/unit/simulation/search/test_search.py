"""The search itself, on the toy: in processes of its own, for a simulation replaces the machine's clock."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.core import reproducible
from tests.simulation.faults.schedule import Schedule, load
from tests.simulation.scenarios import scenario as scenarios
from tests.simulation.scenarios.drawing import draw
from tests.simulation.search.command import main
from tests.simulation.search.runner import Order, Worker
from tests.simulation.search.seeds import one, outcomes

COUNTER = scenarios.load("counter")
BUG = "counter_forgets_ids"
QUICK = ("counter-6", "keys")  # schedules that are run with the fast tests


def test_a_seed_is_one_run_and_another_seed_another() -> None:
    with Worker() as first, Worker() as second:
        runs = [one(worker, COUNTER, draw(COUNTER, seed)) for worker in (first, second) for seed in (1, 2, 1)]
    digests = [run.digest for run in runs]
    assert digests[:3] == digests[3:]
    assert digests[0] == digests[2] != digests[1]
    assert not any(run.broken for run in runs)
    assert all(run.requests and run.simulated >= 1 and sum(run.faults.values()) for run in runs)


@pytest.mark.slow
def test_a_bug_that_is_put_back_is_found_made_short_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "--scenario", "counter", "--seeds", "200", "--failures", "1", "--bug", BUG]) == 1
    said = capsys.readouterr().out
    seed = said.partition("BROKEN by seed ")[2].partition(":")[0]
    assert f"run --scenario counter --seed {seed} --bug {BUG} --story" in said
    out = tmp_path / "found.yaml"
    reduce = ["reduce", "--scenario", "counter", "--seed", seed, "--bug", BUG, "--out", str(out)]
    assert main(reduce) == 1
    found = load(out)
    assert found.breaks == "exactly_once"
    assert len(found.faults) == 1
    assert [plan.requests for plan in found.clients] == [1]
    capsys.readouterr()
    assert main(["run", "--schedule", str(out), "--story"]) == 1
    story = capsys.readouterr().out
    assert f"{found.clients[0].name} → broker-1" in story
    assert f"BROKEN exactly_once: {found.told}" in story
    assert "fault: is " in story


def test_a_run_has_its_addresses_where_each_run_has_them(tmp_path: Path) -> None:
    """What is hashed by its address comes in the same order in each of them."""
    with Worker() as worker:
        assert not one(worker, COUNTER, draw(COUNTER, 1)).fails
        assert worker._process is not None
        personality = int(Path(f"/proc/{worker._process.pid}/personality").read_text(), 16)
    code = "from tests.simulation.core import reproducible as r; r.ensure(); print(int(r.fixed_addresses()))"
    script = tmp_path / "it.py"
    script.write_text(code)
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=given)
    assert bool(personality & reproducible._NO_RANDOMIZE) == bool(int(alone.stdout))  # where the machine allows it


def test_what_breaks_no_promise_is_not_reduced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reduce", "--scenario", "counter", "--seed", "1"]) == 0
    assert "nothing to reduce" in capsys.readouterr().out


def test_a_search_prints_its_coverage_and_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--scenario", "counter"] * 2
    assert main(["search", *twice, "--seeds", "3", "--jobs", "2", "--coverage"]) == 0
    said = capsys.readouterr().out
    one, other, both = [_numbers(line) for line in said.splitlines() if " runs, 0 failed; " in line]
    assert one == other
    assert both == [2 * number for number in one]
    assert one[0] == 3
    assert min(one[2:]) > 0
    assert "simulated hours an hour of one core" in said
    assert "received → queued" in said
    assert "NEVER" in said


def _numbers(line: str) -> list[int]:
    """Runs, failed, faults, requests."""
    return [int(number) for number in re.findall(r"(\d+) (?:runs|failed|faults|requests)", line)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--scenario", "conter"], "There is no scenario 'conter' (did you mean 'counter'?)"),
        (["run", "--scenario", "counter", "--bug", "none"], "There is no bug 'none' to put back; known are"),
        (["search", "--scenario", "counter", "--bug", "none"], "There is no bug 'none' to put back; known are"),
        (["run", "--schedule", "/nowhere.yaml"], "The schedule /nowhere.yaml cannot be used"),
    ],
)
def test_what_there_is_not_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().out


def test_the_command_lists_what_there_is() -> None:
    command = [sys.executable, "-m", "tests.simulation", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("counter", "clock_jump", BUG):
        assert name in said


def test_a_run_that_does_not_end_is_an_outcome() -> None:
    with Worker(timeout=0.0) as worker:
        outcome = one(worker, COUNTER, draw(COUNTER, 1))
        assert [broken.promise for broken in outcome.broken] == ["liveness"]
    with Worker() as worker:
        assert not one(worker, COUNTER, draw(COUNTER, 1)).fails


def test_a_worker_that_breaks_says_so_and_a_new_one_comes() -> None:
    broken = scenarios.Scenario("x", "y", system="counter", services={"broker": 1})
    schedule = Schedule("x", 1, 1.0, bugs=["crash"])
    with Worker() as worker:
        process = worker._started("counter")
        process.kill()
        process.wait()
        assert not worker.run(Order(broken, schedule)).fails


def test_no_run_is_begun_after_the_minutes_are_over() -> None:
    assert list(outcomes(COUNTER, range(1000), minutes=1e-9)) == []


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
        for path in sorted((Path(__file__).parents[3] / "simulation" / "found").glob("*.yaml"))
    ],
)
def test_what_was_found_stays_mended(path: Path) -> None:
    """Each schedule that a search has found and reduced. One with a bug put back must fail, for the search finds it."""
    schedule = load(path)
    with Worker() as worker:
        outcome = one(worker, scenarios.load(schedule.scenario), schedule)
    promises = {broken.promise for broken in outcome.broken}
    assert schedule.breaks in promises if schedule.bugs else not promises, outcome.broken

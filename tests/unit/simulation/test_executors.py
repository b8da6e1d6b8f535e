"""Simulated executors: answers stay right and jobs come to their end, whatever becomes of ranks, trainers and hosts."""

import json
import subprocess
import sys
from typing import Any

import pytest


def ran(name: str, seed: int = 1) -> dict[str, Any]:
    """What came of it; nobody's code has failed meanwhile."""
    command = [sys.executable, "-m", "tests.unit.simulation.executor_runs", name, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failures"] == []
    return found


@pytest.mark.slow
def test_answers_are_right_whatever_becomes_of_ranks_and_supervisors() -> None:
    found = ran("disturbed")
    assert found["right"] == {"killed": True, "stopped": True, "supervisor": True}
    assert found["codes"].count(-9) == 5  # two killed, two given up as hung, one with its supervisor
    assert "ring_lost" in found["told"]
    assert ran("disturbed")["digest"] == found["digest"]


@pytest.mark.slow
def test_more_models_than_fit_are_served_in_turns() -> None:
    found = ran("models")
    assert found["right"]
    assert found["ranks"] > 9  # some were loaded twice


@pytest.mark.slow
def test_jobs_end_in_their_adapter_whatever_becomes_of_trainers_and_hosts() -> None:
    found = ran("jobs")
    assert (found["status"], found["adapters"]) == (["succeeded"] * 3, [1] * 3)
    assert found["wrong"] == []
    assert found["trainers"] > 3


@pytest.mark.parametrize(("fault", "seed"), [("crash", 2), ("hang", 1)])
def test_a_request_that_ends_its_ring_does_not_end_the_next_ones(fault: str, seed: int) -> None:
    """With seeds whose first ring has accepted it: one that dies before it answers the dispatch is no evidence against
    the request, which may end another then (seed 3)."""
    found = ran(f"fatal-{fault}", seed)
    assert found["code"] == "fatal_request"
    assert found["right"]
    assert found["rings"] == 3  # the second is not given the request

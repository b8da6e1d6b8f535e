"""Whole simulated deployments, each in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from services.executor.worker.stub import stub_token


def simulated(*arguments: str) -> Any:
    command = [sys.executable, "-m", "tests.simulation.deployment", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_deployment_starts_answers_and_does_what_its_operator_does() -> None:
    seen = simulated("--seed", "5", "--requests", "3", "--tokens", "8", "--roll")
    assert seen["whole"] >= 8
    assert seen["example"] == [bytes(stub_token(0, position) for position in range(8)).decode()]
    assert (seen["errors"], seen["failures"], seen["logged"]) == ([], [], [])
    again = simulated("--seed", "5", "--requests", "3", "--tokens", "8", "--roll")
    assert (again["digest"], again["now"]) == (seen["digest"], seen["now"])

"""The simulation of hosts that load models, at a small scale: memory suffices, every request is counted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.harness import program
from benchmarks.simulation.models import POLICIES, main, simulate
from benchmarks.simulation.virtual_hosts import Scale, Yard

SMALL = Scale(hosts=30, models=30, load=0.6, seconds=300, warm_up=60, drift=100)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_counts_every_request(policy: str) -> None:
    yard = Yard(SMALL, 1)
    measured = yard.run(POLICIES[policy]())
    assert sum(measured.waits.values()) == measured.arrived > 0
    assert all(0 <= host.free <= host.memory for host in yard.hosts)


def test_ours_serves_when_popularity_changes() -> None:
    ours, static = simulate("ours", SMALL, 1), simulate("static", SMALL, 1)
    assert ours.hits > 0.95
    assert ours.requests == static.requests, "the same trace for all"
    assert 0 < ours.decision_p50 <= ours.decision_p99
    assert simulate("ours", replace(SMALL, seconds=60, drift=0), 2).requests > 0


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    app = program(main)
    options = [
        "--hosts",
        "6",
        "--models",
        "8",
        "--seconds",
        "20",
        "--warm-up",
        "5",
        "--skew",
        "1",
        "--jobs",
        "2",
    ]
    options += ["--policy", "lru", "--policy", "static"]
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, [*options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert [item["policy"] for item in json.loads(file.read_text())["results"]] == ["lru", "static"]
    assert CliRunner().invoke(app, ["--policy", "none"]).exit_code == 2

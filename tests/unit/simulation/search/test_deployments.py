"""Scenarios of the whole control plane: in a process of its own each."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.simulation.faults.schedule import load
from tests.simulation.scenarios import scenario as scenarios
from tests.simulation.scenarios.drawing import draw
from tests.simulation.search.runner import Worker
from tests.simulation.search.seeds import one

FOUND = Path(__file__).parents[3] / "simulation" / "found"


def test_names_of_clients_and_of_their_plans_are_the_simulations_own() -> None:
    """Who reads scenarios imports no services: they would take the machine's clock."""
    code = (
        "from tests.simulation.deployment import install; install()\n"
        "from tests.simulation.clients.client import Plan\n"
        "from tests.simulation.clients.crowd import KINDS\n"
        "from tests.simulation.deployment.services import ROLES\n"
        "from tests.simulation.faults import system\n"
        "assert set(system.CLIENTS) == set(KINDS), set(system.CLIENTS) ^ set(KINDS)\n"
        "assert {*system.PLANS, 'requests'} == set(Plan.__struct_fields__)\n"
        "assert set(system.ROLES) == set(ROLES)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_split_brain_is_found_where_it_is_put_back_and_only_there() -> None:
    schedule = load(FOUND / "split-brain.yaml")
    scenario = scenarios.load(schedule.scenario)
    with Worker() as worker:
        found = one(worker, scenario, schedule)
        mended = one(worker, scenario, msgspec.structs.replace(schedule, bugs=[]))
    assert {broken.promise for broken in found.broken} == {"allowed_refusals"}
    assert mended.broken == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streams", "partitions"])
def test_seeds_break_no_promise(name: str) -> None:
    scenario = scenarios.load(name)
    with Worker() as worker:
        for seed in (1, 2):
            outcome = one(worker, scenario, draw(scenario, seed))
            assert outcome.broken == []
            assert outcome.requests
            assert outcome.seen

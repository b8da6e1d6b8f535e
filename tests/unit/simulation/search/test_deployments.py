"""Scenarios of the whole control plane: in a process of its own each."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.simulation.bugs.table import BUGS, Bug
from tests.simulation.faults.schedule import ClientPlan, Fault, Schedule, load
from tests.simulation.scenarios import scenario as scenarios
from tests.simulation.scenarios.drawing import draw
from tests.simulation.search.runner import Worker
from tests.simulation.search.seeds import one

PAGE = Path(__file__).parents[4] / "docs" / "reliability.md"
FOUND = Path(__file__).parents[3] / "simulation" / "found"


# Of those that are left out a run takes long; the counter's have a test of their own.
SCENARIOS = {name: name for name in sorted(set(scenarios.names()) - {"counter", "days", "training"})}


def in_ci(cases: dict[str, Any], names: set[str]) -> list[Any]:
    """Parameters: those that are named run among the slow tests, the others at night."""
    lanes = {True: (), False: pytest.mark.nightly}
    return [pytest.param(case, id=name, marks=lanes[name in names]) for name, case in cases.items()]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_split_brain_is_found_only_where_it_is_put_back() -> None:
    """That it is found there, tests of all schedules that were found say."""
    schedule = msgspec.structs.replace(load(FOUND / "split-brain.yaml"), bugs=[])
    with Worker() as worker:
        assert one(worker, scenarios.load(schedule.scenario), schedule).broken == []


@pytest.mark.slow
def test_operators_and_brokers_that_repeat_themselves_break_nothing() -> None:
    """A key that is replaced while its clients ask, limits that are lowered, acknowledgements that are lost, a stream
    that is full."""
    faults = [
        Fault("new_key", "", 3.0, parameters={"tenant": 0.0}),
        Fault("lower_limits", "", 6.0, 0, 9.0, {"tenant": 0.99, "requests": 6.0, "concurrent": 1.0}),
        Fault("lost_acks", "broker-1", 1.0, 0, 12.0, {"share": 1.0}),
        Fault("stream_full", "broker-1", 16.0, 0, 2.0, {"number": 0.5}),
    ]
    clients = [
        ClientPlan(kind, f"{kind}-{seed}", 0.0, 2, seed, {"pause": (0, 3), "tokens": (100, 300)})
        for kind in ("stream", "websocket", "grpc", "response")
        for seed in (0, 1)
    ]
    schedule = Schedule("limits", 1, 30.0, faults, clients)
    with Worker() as worker:
        outcome = one(worker, scenarios.load("limits"), schedule)
    assert outcome.broken == []
    assert set(outcome.faults) == {fault.fault for fault in faults}


@pytest.mark.slow
@pytest.mark.parametrize("bug", in_ci(BUGS, {"lines_without_keys", "keys_without_compare_and_set", "records_given_up"}))
def test_a_drawn_schedule_finds_a_bug_that_is_put_back(bug: Bug) -> None:
    scenario, promises = scenarios.load(bug.scenario), set[str]()
    with Worker() as worker:
        for seed in bug.seeds:
            schedule = msgspec.structs.replace(draw(scenario, seed), bugs=[bug.name])
            promises = {broken.promise for broken in one(worker, scenario, schedule).broken}
            if bug.breaks in promises:
                return
    pytest.fail(f"seeds {bug.seeds} of {bug.scenario} break {promises or 'nothing'}, not {bug.breaks}")


def test_the_page_names_each_bug_with_a_seed_that_finds_it() -> None:
    page = PAGE.read_text()
    for bug in BUGS.values():
        if bug.scenario != "counter":
            assert f"| `{bug.name}`" in page
            assert f"--scenario {bug.scenario} --seed {bug.seeds[0]} --bug {bug.name}" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", in_ci(SCENARIOS, {"engines", "everything", "models", "streams", "tenants"}))
def test_a_seed_replays_byte_for_byte_and_breaks_no_promise(name: str) -> None:
    """Its first half minute, by two workers."""
    scenario = msgspec.structs.replace(scenarios.load(name), duration=30.0)
    with Worker() as first, Worker() as second:
        one_run, again = (one(worker, scenario, draw(scenario, 1)) for worker in (first, second))
    assert one_run.broken == []
    assert one_run.seen
    assert one_run.simulated == again.simulated
    assert one_run.digest == again.digest

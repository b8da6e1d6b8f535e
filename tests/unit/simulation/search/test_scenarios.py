"""Scenario files: what is unknown in them is refused with what is known; schedules drawn from them are values."""

from pathlib import Path

import pytest

from tests.simulation.faults.kinds import KINDS
from tests.simulation.faults.schedule import ClientPlan, Fault, Schedule, Unusable, load, save
from tests.simulation.scenarios import scenario as scenarios
from tests.simulation.scenarios.drawing import draw

HEAD = "name: x\nabout: For this test.\nservices: {gateway: 2, broker: 1}\n"


@pytest.mark.parametrize("name", scenarios.names())
def test_each_scenario_can_be_read_and_drawn(name: str) -> None:
    scenario = scenarios.load(name)
    assert scenario.name == name
    schedule = draw(scenario, 7)
    assert schedule == draw(scenario, 7)
    assert schedule != draw(scenario, 8)
    scenarios.check_schedule(scenario, schedule)
    assert all(fault.at < scenario.duration for fault in schedule.faults)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("faults: {kil: {per_hour: 1}}", "There is no fault 'kil'; known are clock_jump, cut,"),
        ("faults: {kill: {per_hour: 1, roles: [gatevay]}}", "did you mean 'gateway'?"),
        ("faults: {kill: {often: 1, per_hour: 1}}", "known are per_hour, lasts, roles, parameters."),
        ("faults: {skew: {per_hour: 1, parameters: {minutes: [1, 2]}}}", "known are seconds."),
        ("faults: {cut: {per_hour: 1, lasts: [3, 2]}}", "faults.cut.lasts must have the smaller number first"),
        ("faults: {kill: {per_hour: -1}}", "Expected `float` >= 0.0"),
        ("faults: {rank_crash: {per_hour: 1}}", "befalls executor, of which the scenario has none"),
        ("clients: {streem: {}}", "There is no client 'streem' (did you mean 'stream'?); known are batches,"),
        ("clients: {stream: {requests: [3, 2]}}", "clients.stream.requests must be two numbers"),
        ("clients: {stream: {parameters: {size_: [1, 2]}}}", "known are pause, prompt, size, tokens, wait."),
        ("settings: {gateway-3: {port: 1}}", "There is no service 'gateway-3' (did you mean 'gateway-2'?)"),
        ("system: deploiment", "There is no system 'deploiment'"),
        ("durations: 3", "known are name, about, duration,"),
        ("duration: 0", "Expected `float` > 0.0"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(HEAD + text)
    with pytest.raises(Unusable) as refused:
        scenarios.load(str(path))
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


def test_an_unknown_service_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nabout: y\nservices: {gatway: 2}")
    with pytest.raises(Unusable, match=r"no service 'gatway' \(did you mean 'gateway'\?\); known are broker, execu"):
        scenarios.load(str(path))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"no scenario 'conter' \(did you mean 'counter'\?\)"):
        scenarios.load("conter")
    with pytest.raises(Unusable, match="cannot be read"):
        scenarios.load(str(tmp_path / "none.yaml"))
    (tmp_path / "no.yaml").write_text("{")
    with pytest.raises(Unusable, match="cannot be read"):
        scenarios.load(str(tmp_path / "no.yaml"))
    with pytest.raises(Unusable, match=r"The schedule .*no.yaml cannot be used"):
        load(tmp_path / "no.yaml")


def test_a_kind_of_fault_that_is_added_leaves_the_others_where_they_were() -> None:
    counter = scenarios.load("counter")
    kills = [fault for fault in draw(counter, 3).faults if fault.fault == "kill"]
    assert kills
    more = {**counter.faults, "clock_jump": scenarios.FaultRate(600.0), "skew": scenarios.FaultRate(600.0)}
    services = {**counter.services, "gateway": 2}
    changed = scenarios.Scenario(**{**_fields(counter), "faults": more, "services": services})
    some = draw(changed, 3).faults
    assert any(fault.fault == "skew" for fault in some)
    # their targets may be others, for there are more now; their times and steps are not
    assert [fault.at for fault in some if fault.fault == "kill"][:1] == [kills[0].at]


def _fields(scenario: scenarios.Scenario) -> dict[str, object]:
    return {name: getattr(scenario, name) for name in scenario.__struct_fields__}


def test_a_schedule_is_kept_in_a_file(tmp_path: Path) -> None:
    schedule = Schedule(
        "counter",
        3,
        60.0,
        [Fault("skew", "gateway-1", 1.5, 0, 2.0, {"seconds": -3.25})],
        [ClientPlan("adder", "adder-1", 0.5, 3, 77, {"tokens": (1.0, 2.0)})],
        ["counter_forgets_ids"],
    )
    save(schedule, tmp_path / "found" / "one.yaml")
    assert load(tmp_path / "found" / "one.yaml") == schedule


def test_a_schedule_of_things_that_there_are_not_is_refused() -> None:
    counter = scenarios.load("counter")
    for schedule, told in (
        (Schedule("counter", 1, 1.0, [Fault("kil", "broker-1")]), "no fault 'kil'"),
        (Schedule("counter", 1, 1.0, [Fault("kill", "broker-2")]), "no instance for the fault kill 'broker-2'"),
        (Schedule("counter", 1, 1.0, [], [ClientPlan("stream", "stream-1")]), "no client 'stream'"),
    ):
        with pytest.raises(Unusable, match=told):
            scenarios.check_schedule(counter, schedule)


def test_each_fault_can_be_told() -> None:
    for kind in KINDS.values():
        assert kind.story
        assert bool(kind.undo) == (kind.lasts[1] > 0)
    assert str(Fault("cut", "gateway-1", 1.0, 5, 2.0, {"other": "broker-1"})) == (
        "    1.000 s and 5 steps  cut gateway-1 for 2.000 s, other broker-1"
    )

"""Schedules are made as short as they can be: what is left is needed, and nothing else is."""

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.faults.schedule import ClientPlan, Fault, Schedule
from tests.simulation.search.reduction import Reduction, ddmin


@given(st.sets(st.integers(0, 40)), st.integers(1, 41))
def test_ddmin_finds_what_is_needed_and_keeps_its_order(needed: set[int], count: int) -> None:
    items = list(range(count))
    wanted = needed & set(items)
    assert ddmin(items, lambda some: wanted <= set(some)) == sorted(wanted)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 8))
def test_no_item_can_be_left_out_of_what_ddmin_finds(items: list[int], least: int) -> None:
    def fails(some: list[int]) -> bool:
        return sum(some) >= least

    if not fails(items):
        return
    found = ddmin(items, fails)
    assert fails(found)
    assert all(not fails(found[:at] + found[at + 1 :]) for at in range(len(found)))


def _schedule() -> Schedule:
    faults = [Fault("kill", f"gateway-{n}", float(n) + 0.25, 40, 0.0) for n in range(6)]
    faults.append(Fault("cut", "gateway-1", 7.777, 0, 8.0, {"other": "broker-1", "seconds": 8.0}))
    clients = [ClientPlan("stream", f"stream-{n}", n * 1.5, requests=9) for n in range(5)]
    return Schedule("x", 1, 600.0, faults, clients)


def test_faults_clients_and_their_numbers_are_reduced() -> None:
    def fails(schedule: Schedule) -> bool:
        cut = [fault for fault in schedule.faults if fault.fault == "cut" and fault.lasts >= 1.0]
        asked = [plan for plan in schedule.clients if plan.name == "stream-3" and plan.requests >= 2]
        return bool(cut and asked)

    short = Reduction(fails, 1000).reduce(_schedule())
    assert short.faults == [Fault("cut", "gateway-1", 8.0, 0, 1.0, {"other": "broker-1", "seconds": 0.0})]
    assert short.clients == [ClientPlan("stream", "stream-3", 0.0, requests=2)]
    assert short.duration == short.ends()


def test_the_best_so_far_is_kept_when_the_runs_are_used_up() -> None:
    runs = []

    def fails(schedule: Schedule) -> bool:
        runs.append(schedule)
        return any(fault.target == "gateway-5" for fault in schedule.faults)

    reduction = Reduction(fails, 4)
    short = reduction.reduce(_schedule())
    assert len(runs) == reduction.runs == 4
    assert len(short.faults) < 7
    assert fails(short)


def test_a_schedule_that_was_run_is_not_run_again() -> None:
    runs = []

    def fails(schedule: Schedule) -> bool:
        runs.append(schedule)
        return True

    Reduction(fails, 1000).reduce(_schedule())
    assert all(runs.count(schedule) == 1 for schedule in runs)

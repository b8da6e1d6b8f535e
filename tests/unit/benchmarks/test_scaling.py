"""The processes' model keeps the laws of queues; processes stay where they are pinned; a run gives every table."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.control_plane import scaling
from benchmarks.control_plane.__main__ import Plan, run_scaling
from benchmarks.control_plane.scaling import Alone, Several, computing, pinned, predicted, ready_seconds
from benchmarks.process_cpu import cpu_seconds
from benchmarks.simulation.virtual_processes import PARTS, Demand, Load, Processes, Shape, most, rings_for
from tests.unit.benchmarks.terminal import shown

TOKENS = 4
DEMANDS = {
    "gateway": Demand(0.3, 0.05),
    "nats": Demand(0.04, 0.01),
    "scheduler": Demand(0.1),
    "executor": Demand(0.1, 0.02),
    "client": Demand(0.1),
}


def children() -> list[int]:
    """Processes that this one has started."""
    return [process.pid for process in psutil.Process().children()]


def test_the_first_process_that_is_always_busy_bounds_the_rate() -> None:
    assert most(DEMANDS, Shape(), TOKENS) == (pytest.approx(2000), "gateway")
    assert most(DEMANDS, Shape(gateways=2), TOKENS) == (pytest.approx(4000), "gateway")
    rate, bound = most(DEMANDS, Shape(gateways=8, rings=8), TOKENS)
    assert (round(rate), bound) == (10_000, "scheduler")
    rate, bound = most(DEMANDS, Shape(gateways=8, schedulers=2, rings=8), TOKENS)
    assert (round(rate), bound) == (12_500, "nats")


def test_rings_are_as_many_as_keep_them_below_the_share() -> None:
    assert rings_for(DEMANDS, Shape(gateways=2), TOKENS, 1.0) == 1
    assert rings_for(DEMANDS, Shape(gateways=2), TOKENS, 0.5) == 2


def test_an_answer_takes_its_own_way_where_nothing_queues() -> None:
    found = Processes(DEMANDS, Shape(), Load(TOKENS, requests=20, rate=0.001, pause_ms=3.0)).run()
    way = 0.3 + 0.04 + 0.1 + 0.1 + TOKENS * 0.02  # the first tokens leave while the next are made
    assert found.p50_ms == pytest.approx(way + 0.06 + 3 * (0.05 - 0.02) + 3.0)
    assert found.p99_ms == pytest.approx(found.p50_ms)


def test_few_cores_are_always_busy_in_a_closed_loop() -> None:
    shape = Shape(gateways=4, rings=2, cores=2)
    found = Processes(DEMANDS, shape, Load(TOKENS, requests=4000, connections=64)).run()
    cost = sum(demand.of(TOKENS) for demand in DEMANDS.values())
    assert found.requests_per_second == pytest.approx(2000 / cost, rel=0.02)
    assert sum(found.busy.values()) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("gateways", "rate"), [(1, 1400.0), (2, 2800.0)])
def test_an_open_loop_below_the_bound_keeps_up_and_waits_more_the_nearer_it_comes(
    gateways: int, rate: float
) -> None:
    shape = Shape(gateways=gateways, rings=2)
    calm = Processes(DEMANDS, shape, Load(TOKENS, requests=8000, rate=rate / 2)).run()
    full = Processes(DEMANDS, shape, Load(TOKENS, requests=8000, rate=rate)).run()
    assert full.requests_per_second == pytest.approx(rate, rel=0.05)
    assert full.busy["gateway"] == pytest.approx(rate * 0.5 / 1e3, rel=0.05)
    assert calm.p99_ms < full.p99_ms


def test_what_was_measured_of_several_is_what_they_cost_in_the_model() -> None:
    twice = dict.fromkeys(PARTS, 1.0) | {"gateway": 2.0}
    two = Several(gateways=2, schedulers=1, cpu_ms={}, ratios=twice)
    one, more = predicted(DEMANDS, [two], TOKENS, 0.0)
    assert (one.gateways, one.bound, round(one.most)) == (1, "gateway", 2000)
    assert (more.gateways, more.bound, round(more.most)) == (2, "gateway", 2000)
    assert one.rate == pytest.approx(1400)


def test_a_process_that_always_had_something_to_do_was_waited_for() -> None:
    found = Alone(part="nats", others=3, requests_per_second=1000, share=0.24, ready=0.95, cpu_ms=0.24)
    assert found.limits
    assert found.whole_core == pytest.approx(4167, rel=0.001)
    assert not msgspec.structs.replace(found, ready=0.5).limits


def test_waiting_for_a_core_counts_as_well_as_computing() -> None:
    deadline, others = time.monotonic() + 60, children()
    with computing(2, min(os.sched_getaffinity(0))):
        pid = min(set(children()) - set(others))
        while ready_seconds([pid]) < cpu_seconds({"one": [pid]})["one"] + 0.05:
            assert time.monotonic() < deadline, "it has never waited for the other one"
    assert ready_seconds([pid]) == 0.0, "it has ended"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_stay_where_they_are_pinned_until_the_end() -> None:
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pinned({"part": [process.pid]}, "part", first, {second}), computing(2, first):
            assert os.sched_getaffinity(process.pid) == {first}
            assert os.sched_getaffinity(0) == {second}
            there = [pid for pid in children() if os.sched_getaffinity(pid) == {first}]
            assert len(there) == 3
        assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0) == before
        process.communicate(b"\n")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the load client needs a C compiler")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_a_run_gives_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SHAPES", ((2, 2),))
    plan = Plan(work=tmp_path, tokens=TOKENS, connections=8, seconds=0.5, rounds=1)
    found = await run_scaling(plan, tmp_path, lambda text: None)
    assert not found.faults
    assert [each.part for each in found.alone] == list(PARTS)
    assert all(each.share > 0 for each in found.alone)
    assert [(each.gateways, each.schedulers) for each in found.predicted] == [(1, 1), (2, 2)]
    assert "2 gateways and rings, 2 schedulers" in shown(*found.parts())

"""The benchmarks of the batcher alone: they run, and prefix reuse is what it should be."""

import pytest

from benchmarks.engine.bookkeeping import Case, run_case
from benchmarks.engine.prefix import CASES, Load
from benchmarks.serve.workloads import WORKLOADS
from services.executor.core.engine import EngineSpec


@pytest.mark.parametrize("name", [name for name in CASES if "nowhere" not in name])
def test_more_than_95_percent_of_what_was_said_is_found(name: str) -> None:
    sessions, spec = CASES[name]
    reuse = Load(WORKLOADS["W4"], sessions, spec).run()
    assert reuse.reusable == sessions * sum(164 * turn for turn in (1, 2, 3))
    assert 0.95 < reuse.hit_rate < 1


def test_pressure_without_a_place_to_spill_to_loses_most() -> None:
    sessions, spec = CASES["64 sessions, room for 9, nowhere to spill"]
    assert Load(WORKLOADS["W4"], sessions, spec).run().hit_rate < 0.5


def test_every_request_of_a_workload_is_run() -> None:
    times = run_case(Case("small", 4, 12, 20, 5, 1.0), EngineSpec(16, 64, 100, 50_000))
    assert len(times) >= 3 * 5
    assert min(map(sum, times)) > 0

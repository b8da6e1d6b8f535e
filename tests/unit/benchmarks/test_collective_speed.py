"""The dry run on a CPU: two real processes over gloo, by the code that runs on GPUs."""

import pytest

from benchmarks.on_gpu import collective_speed
from benchmarks.on_gpu.collective_speed import TINY_SIZES
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench


@pytest.mark.slow
def test_a_dry_run_gives_a_row_for_each_size_and_says_what_is_not_offered() -> None:
    rows = collective_speed.run(dry_bench())
    assert [row.key for row in rows] == [f"collectives/2/gloo/{size}" for size in TINY_SIZES] + [
        "collectives/2/symmetric"
    ]
    assert all(row.ok for row in rows)
    assert all(row.figure and row.figure > 0 for row in rows[:-1])
    assert rows[-1].figure is None

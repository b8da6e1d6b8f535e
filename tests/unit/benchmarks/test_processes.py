"""The CPU time of processes."""

import os

from benchmarks.processes import cpu_seconds


def test_cpu_time_grows_and_a_process_that_has_ended_counts_nothing() -> None:
    processes = {"gone": [2**22 + 1], "here": [os.getpid()]}
    before = cpu_seconds(processes)
    sum(range(10_000))
    after = cpu_seconds(processes)
    assert before["gone"] == after["gone"] == 0
    assert after["here"] > before["here"] > 0

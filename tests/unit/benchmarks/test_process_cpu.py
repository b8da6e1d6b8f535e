"""What is counted of processes: their CPU time, and how often they woke up."""

import asyncio
import os
import sys

import pytest

from benchmarks.process_cpu import cpu_seconds, wake_ups

TIMES = 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them for each thread")
async def test_a_process_wakes_up_for_each_line_that_it_waits_for() -> None:
    echo = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert echo.stdin is not None
    assert echo.stdout is not None
    processes = {"echo": [echo.pid]}
    try:
        woken, cpu = [], []
        for _ in range(TIMES):
            echo.stdin.write(b"line\n")
            await echo.stdout.readline()
            woken.append(wake_ups(processes)["echo"])
            cpu.append(cpu_seconds(processes)["echo"])
        assert woken[-1] - woken[0] >= TIMES // 2  # it may not have slept yet when the next line came
        assert cpu[-1] > cpu[0]
    finally:
        echo.stdin.close()
        await echo.wait()


def test_a_process_that_has_ended_counts_nothing() -> None:
    assert wake_ups({"gone": [2**22 + 1], "none": []}) == {"gone": 0, "none": 0}
    assert cpu_seconds({"gone": [2**22 + 1], "here": [os.getpid()]})["gone"] == 0

"""What a stack costs that nobody asks anything: CPU time and wake-ups of its processes.

On a small virtual machine each wake-up of a process that slept costs some tenths of a millisecond, whatever it does
then: at a set speed that is much of what a token costs, and here it is all.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping

import msgspec

from benchmarks.process_cpu import cpu_seconds, wake_ups


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """For a second, by process."""

    cpu_ms: dict[str, float]
    wake_ups: dict[str, float]
    """How often a thread that had nothing to do went on; 0 where that is not known."""


async def measure_idle(processes: Mapping[str, Iterable[int]], seconds: float) -> Idle:
    """Of a stack that is left alone meanwhile."""
    begun, cpu, woken = time.monotonic(), cpu_seconds(processes), wake_ups(processes)
    await asyncio.sleep(seconds)
    passed, cpu_after, woken_after = time.monotonic() - begun, cpu_seconds(processes), wake_ups(processes)
    return Idle(
        cpu_ms={name: (cpu_after[name] - before) * 1e3 / passed for name, before in cpu.items()},
        wake_ups={name: (woken_after[name] - before) / passed for name, before in woken.items()},
    )


def idle_line(found: Idle) -> str:
    """One line of the report."""
    parts = ", ".join(f"{name} {ms:.1f} / {found.wake_ups[name]:.0f}" for name, ms in found.cpu_ms.items())
    return (
        f"Idle, CPU ms / wake-ups a second: {sum(found.cpu_ms.values()):.1f} / "
        f"{sum(found.wake_ups.values()):.0f} ({parts})."
    )

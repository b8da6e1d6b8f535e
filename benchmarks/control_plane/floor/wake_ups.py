"""What it costs to be woken: an event loop that does nothing else, and the same Python after a pause.

    woken     an event loop that sleeps and is woken, so many times a second
    a pause   a fixed piece of Python, in a loop and after pauses of some milliseconds

Where requests and tokens come one by one, each wakes several processes: this is the part of their CPU time that no
change of what those processes do takes away.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import msgspec

RATES = (25, 1000)
"""Wake-ups a second."""
PAUSES = (0.0, 0.005, 0.02)
"""Seconds."""
SECONDS = 2.0
"""Of each rate."""
TIMES = 100
"""Of the piece of Python, for each pause."""


class WakeUps(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU time."""

    woken_us: dict[str, float]
    """Of one wake-up, by wake-ups a second."""
    work_us: dict[str, float]
    """Of the piece of Python, by the milliseconds before it."""


async def measure_wake_ups(seconds: float = SECONDS, times: int = TIMES) -> WakeUps:
    """In this process, whose event loop does nothing else meanwhile."""
    return WakeUps(
        woken_us={str(rate): await _woken(rate, seconds) for rate in RATES},
        work_us={f"{pause * 1e3:g}": _work_after(pause, times) for pause in PAUSES},
    )


async def _woken(rate: int, seconds: float) -> float:
    count = max(1, round(rate * seconds))
    before = time.process_time()
    for _ in range(count):
        await asyncio.sleep(1 / rate)
    return (time.process_time() - before) / count * 1e6


def _work_after(pause: float, times: int) -> float:
    found = []
    for _ in range(times):
        time.sleep(pause)
        before = time.process_time()
        _work()
        found.append((time.process_time() - before) * 1e6)
    return statistics.median(found)


def _work() -> int:
    """60 small JSON texts, there and back."""
    texts = [json.dumps({"a": [1, 2, 3], "b": str(at)}) for at in range(60)]
    return len({text: json.loads(text) for text in texts})


def lines(found: WakeUps) -> Sequence[str]:
    """Of the report."""
    woken = ", ".join(f"{us:.0f} us at {rate}" for rate, us in found.woken_us.items())
    work = ", ".join(f"{us:.0f} us after {pause} ms" for pause, us in found.work_us.items())
    return (
        f"An event loop that is woken, by wake-ups a second: {woken}.",
        f"The same piece of Python: {work}.",
    )

"""What programs take from their machine, taken from the simulation: time, randomness, threads.

Installed once, before any service is imported: functions that were taken as defaults would else be the machine's own.
The clocks are those of the process whose code runs; outside a simulation they are the machine's.
"""

import concurrent.futures
import os
import random
import time
from collections.abc import Callable
from typing import Any

from tests.simulation.core.processes import CURRENT

EPOCH = 1_800_000_000.0
"""The time of day at which every simulation begins, in seconds since 1970."""
_real = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "sleep")}


class _Ambient:
    loop: Any = None
    draw: random.Random | None = None


def enter(loop: Any, seed: int) -> None:
    """From now on, `loop`'s time and this seed's randomness are everybody's."""
    _Ambient.loop, _Ambient.draw = loop, random.Random(seed)
    random.seed(seed)


def leave() -> None:
    _Ambient.loop = _Ambient.draw = None


def real_time() -> float:
    """The machine's own clock, in seconds."""
    return float(_real["perf_counter"]())


def _monotonic() -> float:
    loop = _Ambient.loop
    return _real["monotonic"]() if loop is None else loop.time()


def _time() -> float:
    loop = _Ambient.loop
    return _real["time"]() if loop is None else EPOCH + loop.time() + CURRENT.get().host.skew


def _sleep(seconds: float) -> None:
    loop = _Ambient.loop
    if loop is None:
        _real["sleep"](seconds)
    else:
        loop.sleep(seconds)


def _nanoseconds(seconds: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(seconds() * 1e9)


_urandom = os.urandom


def _random_bytes(count: int) -> bytes:
    draw = _Ambient.draw
    return _urandom(count) if draw is None else draw.randbytes(count)


def _submit(
    pool: Any, work: Callable[..., Any], /, *args: Any, **named: Any
) -> "concurrent.futures.Future[Any]":
    if _Ambient.loop is None:
        return _submit_to_thread(pool, work, *args, **named)
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        future.set_result(work(*args, **named))
    except Exception as error:  # the future has it
        future.set_exception(error)
    return future


_submit_to_thread = concurrent.futures.ThreadPoolExecutor.submit


def install() -> None:
    """Idempotent."""
    time.time, time.monotonic, time.perf_counter, time.sleep = _time, _monotonic, _monotonic, _sleep
    time.time_ns, time.monotonic_ns, time.perf_counter_ns = (
        _nanoseconds(_time),
        _nanoseconds(_monotonic),
        _nanoseconds(_monotonic),
    )
    os.urandom = _random_bytes
    random._urandom = _random_bytes
    concurrent.futures.ThreadPoolExecutor.submit = _submit

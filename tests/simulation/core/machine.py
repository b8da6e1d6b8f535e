"""What programs take from their machine, taken from the simulation: time, randomness, threads, numbers and names.

Installed once, before any service is imported: functions that were taken as defaults would else be the machine's own.
The clocks are those of the process whose code runs; outside a simulation they are the machine's.

    time, datetime.now     the loop's time, the host's clock of the day      time.sleep      of a thread's work: later
    random, secrets, uuid  from the seed                                     threads         at once, their result later
    os.getpid, os.kill     the simulated process                             subprocess, threading.Thread      refused
"""

import concurrent.futures
import contextlib
import ctypes
import datetime
import gc
import os
import platform
import queue
import random
import socket
import subprocess
import threading
import time
import timeit
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.core.loop import settle
from tests.simulation.core.processes import CURRENT, OUTSIDE, NotSimulated, Process

# The time of day at which every simulation begins, in seconds since 1970. Files of the machine's own are younger.
EPOCH = 1_700_000_000.0
CORES = {0, 1}  # of every host
_real = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "sleep")}


class _Ambient:
    loop: Any = None
    seed = 0
    signal: Callable[[int, int], None] | None = None
    allowed = 0


# Generators that modules made for themselves when they were imported: each run begins with the same ones.
_unseeded: "list[weakref.ref[random.Random]]" = []


def enter(loop: Any, seed: int, signal: Callable[[int, int], None] | None = None) -> None:
    """From now on, `loop`'s time and this seed's randomness are everybody's. `signal`: what os.kill does."""
    _Ambient.loop, _Ambient.seed, _Ambient.signal = loop, seed, signal
    random.seed(seed)
    for number, reference in enumerate(_unseeded):
        if (generator := reference()) is not None:
            generator.seed(f"{seed} {number}")


def leave() -> None:
    _Ambient.loop = _Ambient.signal = None


def real_time() -> float:
    """The machine's own clock, in seconds."""
    return float(_real["perf_counter"]())


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """In here, threads and processes of the machine may be started: what they do must follow from their input."""
    _Ambient.allowed += 1
    try:
        yield
    finally:
        _Ambient.allowed -= 1


# --- time ------------------------------------------------------------------------------------------


def _monotonic() -> float:
    loop = _Ambient.loop
    return _real["monotonic"]() if loop is None else loop._now + (loop.slept or 0.0)


def _time() -> float:
    loop = _Ambient.loop
    if loop is None:
        return _real["time"]()
    now = loop._now + (loop.slept or 0.0)
    return EPOCH + now + CURRENT.get().host.ahead(now)


def _sleep(seconds: float) -> None:
    loop = _Ambient.loop
    if loop is None:
        _real["sleep"](seconds)
    elif loop.slept is None:
        raise NotSimulated("time.sleep on its event loop", "await asyncio.sleep, or sleep in a thread's work")
    else:
        loop.slept += seconds


def _nanoseconds(seconds: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(seconds() * 1e9)


_gmtime, _localtime, _ctime, _strftime = time.gmtime, time.localtime, time.ctime, time.strftime


def _of_now(function: Callable[[float], Any]) -> Callable[..., Any]:
    return lambda seconds=None: function(_time() if seconds is None else seconds)


def _formatted(pattern: str, at: Any = None) -> str:
    return _strftime(pattern, _gmtime(_time()) if at is None else at)


def _now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
    return cls.fromtimestamp(_time(), tz)


def _utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
    return cls.fromtimestamp(_time(), datetime.UTC).replace(tzinfo=None)


def _set_on(type_: type, **methods: Callable[..., Any]) -> None:
    """Replaces class methods of a class that is C's, so that all who have imported it get ours."""
    namespace = gc.get_referents(type_.__dict__)[0]
    for name, method in methods.items():
        namespace[name] = classmethod(method)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(type_))


# --- randomness --------------------------------------------------------------------------------------

_urandom, _seed = os.urandom, random.Random.seed


def _random_bytes(count: int) -> bytes:
    """Each process has numbers of its own: what one of them draws changes nothing for the others."""
    if _Ambient.loop is None:
        return _urandom(count)
    process = CURRENT.get()
    if process.draw is None:
        process.draw = random.Random(f"{_Ambient.seed} {process.name} {process.life}")
    return process.draw.randbytes(count)


def _seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
    if a is None:
        if _Ambient.loop is None:
            _unseeded.append(weakref.ref(generator))
        a = int.from_bytes(_random_bytes(32))
    _seed(generator, a, version)


# --- threads and processes -----------------------------------------------------------------------------

_submit_to_thread = concurrent.futures.ThreadPoolExecutor.submit
_start_thread, _wait, _popen = threading.Thread.start, threading.Condition.wait, subprocess.Popen.__init__
_affinity, _cpu_count = os.sched_getaffinity, os.cpu_count
_kill, _getpid, _gethostname, _node = os.kill, os.getpid, socket.gethostname, platform.node


def _real_ones() -> bool:
    return _Ambient.loop is None or bool(_Ambient.allowed)


def _submit(pool: Any, work: Callable[..., Any], /, *args: Any, **named: Any) -> "concurrent.futures.Future[Any]":
    if _real_ones():
        return _submit_to_thread(pool, work, *args, **named)
    loop = _Ambient.loop
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    result, error, slept = loop.in_thread(lambda: work(*args, **named))
    if loop.slept is None:
        loop.call_later(slept, settle, future, result, error)
    else:  # a thread has a thread do something, and may wait for it
        settle(future, result, error)
    return future


def _started(thread: threading.Thread) -> None:
    if not _real_ones():
        raise NotSimulated(f"a thread {thread.name!r}", "use a task, or loop.run_in_executor for what ends")
    _start_thread(thread)


def _waited(condition: threading.Condition, timeout: float | None = None) -> bool:
    """Nobody can notify it meanwhile: all threads' work is done at once."""
    loop = _Ambient.loop
    if _real_ones():
        return _wait(condition, timeout)
    if timeout is None or loop.slept is None:
        raise NotSimulated("a lock that blocks", "await what ends, or wait in a thread's work, with a time-out")
    loop.slept += max(0.0, timeout)
    return False


def _opened(process: "subprocess.Popen[Any]", *args: Any, **named: Any) -> None:
    if not _real_ones():
        command = args[0] if args else named.get("args")
        instead = "give the service a starter that makes a process of the world"
        raise NotSimulated(f"the process {command} of the machine", instead)
    _popen(process, *args, **named)


def _process() -> Process | None:
    process = CURRENT.get() if _Ambient.loop is not None else OUTSIDE
    return None if process is OUTSIDE else process


def _own_pid() -> int:
    process = _process()
    return _getpid() if process is None else process.pid


def _killed(pid: int, number: int) -> None:
    if _process() is None or _Ambient.signal is None:
        _kill(pid, number)
    else:
        _Ambient.signal(pid, number)


def _exited(code: int) -> None:
    process = _process()
    if process is None:
        _exit(code)
    _Ambient.loop.on_exit(process, code)
    raise SystemExit(code)


_exit = os._exit


def _host_name(real: Callable[[], str]) -> Callable[[], str]:
    def name() -> str:
        process = _process()
        return real() if process is None else process.host.name

    return name


def _cores(pid: int) -> set[int]:
    return _affinity(pid) if _Ambient.loop is None else set(CORES)


def _core_count() -> int | None:
    return _cpu_count() if _Ambient.loop is None else len(CORES)


def install() -> None:
    """Idempotent."""
    time.time, time.monotonic, time.perf_counter, time.sleep = _time, _monotonic, _monotonic, _sleep
    time.time_ns, time.monotonic_ns, time.perf_counter_ns = (
        _nanoseconds(_time),
        _nanoseconds(_monotonic),
        _nanoseconds(_monotonic),
    )
    time.gmtime, time.localtime, time.ctime = _of_now(_gmtime), _of_now(_localtime), _of_now(_ctime)  # type: ignore[assignment]
    time.strftime = _formatted  # type: ignore[assignment]
    threading._time = queue.time = timeit.default_timer = _monotonic  # type: ignore[attr-defined]
    _set_on(datetime.datetime, now=_now, utcnow=_utcnow)  # `today` asks time.time
    os.urandom = random._urandom = _random_bytes  # type: ignore[attr-defined]
    random.Random.seed = _seeded  # type: ignore[method-assign,assignment]
    concurrent.futures.ThreadPoolExecutor.submit = _submit  # type: ignore[assignment]
    threading.Thread.start, threading.Condition.wait = _started, _waited  # type: ignore[method-assign]
    subprocess.Popen.__init__ = _opened  # type: ignore[method-assign,assignment]
    os.getpid, os.kill, os._exit = _own_pid, _killed, _exited  # type: ignore[assignment]
    os.sched_getaffinity, os.cpu_count = _cores, _core_count  # type: ignore[assignment]
    socket.gethostname, platform.node = _host_name(_gethostname), _host_name(_node)

"""CPU time and wake-ups of processes, and those of a stack that runs here."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

_SCHEDULED = 2
"""In a clock's number: of a process's CPU time (clock_getcpuclockid in glibc, CPUCLOCK_SCHED in Linux)."""


def cpu_seconds(processes: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """User and system seconds so far, by the names of `processes`; one that has ended counts nothing."""
    return {name: sum(map(_of, pids)) for name, pids in processes.items()}


def _of(pid: int) -> float:
    """To the nanosecond: /proc has hundredths of a second, which is much of a short run."""
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0


def wake_ups(processes: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """How often their threads have slept so far until something was to be done, as Linux counts it; else 0."""
    return {name: sum(map(_sleeps_of, pids)) for name, pids in processes.items()}


def _sleeps_of(pid: int) -> int:
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            count += int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def stack_at(port: int) -> dict[str, list[int]]:
    """Processes of the stack whose gateway listens on `port` of this machine, by service; empty: none found."""
    for process in psutil.process_iter():
        try:
            listens = any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections("tcp")
            )
        except psutil.Error:
            continue
        if listens and (root := process.parent()) is not None:
            return _by_name([root, *root.children(recursive=True)])
    return {}


def _by_name(processes: Iterable[psutil.Process]) -> dict[str, list[int]]:
    names: dict[str, list[int]] = {}
    for process in processes:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        service = next((word for word in words if word.startswith("services.")), "")
        names.setdefault(service.removeprefix("services.") or process.name(), []).append(process.pid)
    return names

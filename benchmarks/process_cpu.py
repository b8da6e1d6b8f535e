"""CPU time of processes, from /proc."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(processes: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """User and system seconds so far, by the names of `processes`; one that has ended counts nothing."""
    return {name: sum(map(_of, pids)) for name, pids in processes.items()}


def _of(pid: int) -> float:
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return (int(fields[11]) + int(fields[12])) * _TICK

"""CPU time of processes, from /proc, and those of a stack that runs here."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

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

"""Processes that a benchmark starts: how they are begun and ended, what they hold, what they cost."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.errors import BenchError
from shared.process import die_with_parent

ROOT = Path(__file__).parents[1]


class Child:
    """A process that prints a line once it is ready, and runs until it is ended."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name, self._command = name, list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self) -> None:
        """Raises BenchError where it ends without its line."""
        if not await asyncio.to_thread(self._start):
            raise BenchError(f"{self._name} did not start; its error stands above.")

    def _start(self) -> bytes:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.communicate)


def python(module: str, *arguments: object) -> list[str]:
    """The command of a module of this repository."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def status_bytes(pid: int | str, file: str, key: str) -> int:
    """A figure of a file below /proc/PID that is there in kB; 0 for a process that has ended."""
    try:
        lines = Path("/proc", str(pid), file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


# In a clock's number: of a process's CPU time (clock_getcpuclockid in glibc, CPUCLOCK_SCHED in Linux).
_SCHEDULED = 2


def cpu_seconds(processes: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """User and system seconds so far, by the names of `processes`; one that has ended counts nothing."""
    return {name: sum(map(_of, pids)) for name, pids in processes.items()}


def _of(pid: int) -> float:
    """To the nanosecond: /proc has hundredths of a second, which is much of a short run."""
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0

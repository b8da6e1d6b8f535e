"""Processes that a benchmark starts: how they are begun and ended, what they hold, what they cost."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.errors import BenchError
from shared.config import CommonSettings
from shared.process import die_with_parent

ROOT = Path(__file__).parents[1]


class Child:
    """A process that prints a line once it is ready, and runs until it is ended."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        root: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`root`: where it runs, and what its Python imports from."""
        self._name = name
        self._command = list(command)
        self._root = root
        self._variables = {"PYTHONPATH": str(root), **(variables or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self) -> bytes:
        """Its line. Raises BenchError where it ends without one."""
        return await asyncio.to_thread(self._start)

    def _start(self) -> bytes:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._root,
            env={**os.environ, **self._variables},
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"{self._name} did not start; its error stands above.")
        return line

    async def stop(self, patience: float = 0.0) -> None:
        """Closes what it reads, and kills it where it has not ended then."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                await asyncio.to_thread(self._process.communicate, None, patience)
        self._process.kill()
        await asyncio.to_thread(self._process.communicate)


def python(module: str, *arguments: object) -> list[str]:
    """The command of a module of this repository."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def nats_variables(settings: CommonSettings) -> dict[str, str]:
    """What tells a service where NATS is."""
    return {
        "RYZANSTEIN_NATS_URL": settings.nats_url,
        "RYZANSTEIN_NATS_USER": settings.nats_user,
        "RYZANSTEIN_NATS_PASSWORD": settings.nats_password.get_secret_value(),
    }


def status_bytes(pid: int | str, file: str, key: str) -> int:
    """A figure of a file below /proc/PID that is there in kB; 0 for a process that has ended."""
    try:
        lines = Path("/proc", str(pid), file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)

"""One service of the local stack: a process with its settings in the environment and its output in a log."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from services.cli.serve import MODULES
from shared.process import die_with_parent

_LAST_LINES = 50


class Child:
    """Started, waited for and stopped; may be started again once it has ended."""

    def __init__(
        self,
        service: str,
        instance: str,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.service = service
        self.instance = instance
        self.log = log
        self.arguments = arguments
        """May be changed between two starts."""
        self._environment = {**(environment or {}), "RYZANSTEIN_INSTANCE": instance}
        self._process: asyncio.subprocess.Process | None = None
        self._log_begin = 0
        """Where in the log the output of the present process begins."""

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment`: what all children share. Raises `OSError` when there can be no process."""
        with self.log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[self.service],
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, **self._environment},
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the others in order
                preexec_fn=die_with_parent(),
            )

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_error(self) -> str:
        """The sentence with which the process ended, from what it has written to its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_begin)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        errors = [line for line in lines[-_LAST_LINES:] if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        return f"The {self.service} {ending(self.returncode)}; its log is {self.log}."


def ending(code: int | None) -> str:
    """An exit code in words: `ended with code 3`, `was killed by SIGKILL`."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def set_aside(directory: Path) -> None:
    """Keeps the logs of the last run as `*.log.1`, and those of no other."""
    for log in directory.glob("*.log"):
        log.replace(log.with_name(f"{log.name}.1"))

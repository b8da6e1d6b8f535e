"""`ryzanstein up` as a user starts it: a process, its output, its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from services.cli.commands.status import read_status
from services.cli.target import nats_of_stack, read_run_file

CLI = [sys.executable, "-m", "services.cli"]


class Stack:
    """A local stack on a data directory of its own. Use as a context manager."""

    def __init__(
        self, data_dir: Path, *arguments: str, command: Sequence[str] = CLI, cwd: Path | None = None, **environment: str
    ) -> None:
        self.data_dir = data_dir
        self.output = ""
        self._environment = {**os.environ, **environment}
        self._cwd = cwd
        self._arguments = [*command, "up", "--data-dir", str(data_dir), "--port", "0", *arguments]
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def url(self) -> str:
        note = read_run_file(self.data_dir)
        assert note is not None, self.output
        return note.gateway_url

    def __enter__(self) -> "Stack":
        self.begin()
        try:
            self.read_until("Serving.")
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self) -> None:
        """Starts the command without waiting for anything."""
        self._process = subprocess.Popen(
            self._arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            cwd=self._cwd,
        )

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            rest, _none = self.process.communicate(timeout=60)
            self.output += rest
        except subprocess.TimeoutExpired:
            self.process.kill()
            rest, _none = self.process.communicate()
            raise AssertionError(f"up did not end when told to:\n{self.output}{rest}\n{self.logs()}") from None

    def read_until(self, text: str) -> None:
        """Reads the command's output up to a line with `text`; fails with all of it when it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"up ended with {self.process.wait()}:\n{self.output}\n{self.logs()}")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid_of(self, program: str) -> int:
        """Of the one process below `up` in whose command line `program` is a word, or ends one."""
        found = [
            process.pid for process in self.descendants() if any(word.endswith(program) for word in process.cmdline())
        ]
        assert len(found) == 1, f"{program}: {found}"
        return found[0]

    def status(self) -> dict[str, Any]:
        """What `ryzanstein status --json` prints, without a process for each look. Not from a coroutine."""
        found = asyncio.run(read_status(nats_of_stack(self.data_dir, "")))
        return json.loads(msgspec.json.encode(found.status))

    def logs(self, pattern: str = "*.log") -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted((self.data_dir / "logs").glob(pattern))
        )

    def group_of(self, request_id: str) -> set[str]:
        """The executors that accepted a request, by their logs."""
        found = set()
        for path in (self.data_dir / "logs").glob("executor-*.log"):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
            if any(line.get("request_id") == request_id and line["event"] == "accepted" for line in lines):
                found.add(path.stem)
        return found


def run_cli(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command of the CLI, to its end."""
    return subprocess.run(
        [*CLI, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )

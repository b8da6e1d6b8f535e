"""One server as a process: started, waited for, measured, and stopped so that nothing is left of it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from benchmarks.errors import BenchError
from benchmarks.peers.catalog import OFFLINE, Launch
from benchmarks.processes import status_bytes
from benchmarks.serve.runner import Target, choose_model, wait_answered
from benchmarks.serve.sse import Answer, Client
from shared.process import die_with_parent

_GRACE_SECONDS = 30.0


class Memory(msgspec.Struct, frozen=True):
    """Of a server's whole process tree, in bytes."""

    peak_rss: int  # the sum of every process's own peak. Pages that processes share count in each of them
    pss: int  # at the end of the load; shared pages count once


class Server:
    """A context manager: leaving it stops the server, whatever happened."""

    def __init__(self, launch: Launch, log: Path, folder: Path) -> None:
        """`log` takes what the server prints; it runs in `folder`."""
        self._launch = launch
        self._log = log
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0.0  # `time.perf_counter` of the start

    def __enter__(self) -> "Server":
        inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with self._log.open("wb") as output:
            self.started = time.perf_counter()
            try:
                self._process = subprocess.Popen(
                    self._launch.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    env={**inherited, **OFFLINE, **self._launch.variables},
                    start_new_session=True,  # a process group of its own; Ctrl-C reaches us alone
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                raise BenchError(f"{self._launch.command[0]} cannot be started: {error.strerror}.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ended(self) -> str | None:
        """What the server last said, if it has ended; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the server ended with code {self._process.returncode} and said {self._last_line()!r}"

    def _last_line(self) -> str:
        """The last line of its log that looks like a reason, else simply the last."""
        lines = [" ".join(line.split()) for line in self._log.read_text(errors="replace").splitlines()[-200:]]
        reasons = [line for line in lines if "error" in line.lower()]
        return ([""] + [line for line in lines if line] + reasons[-1:])[-1][-300:]

    def processes(self) -> list[psutil.Process]:
        """The server, what it has started, and whatever else is in its process group."""
        if self._process is None:
            return []
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            head = psutil.Process(self._process.pid)
            found = {each.pid: each for each in [head, *head.children(recursive=True)]}
        for each in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.getpgid(each.pid) == self._process.pid:
                    found[each.pid] = each
        return list(found.values())

    def memory(self) -> Memory:
        processes = self.processes()
        return Memory(
            peak_rss=sum(status_bytes(each.pid, "status", "VmHWM") for each in processes),
            pss=sum(status_bytes(each.pid, "smaps_rollup", "Pss") for each in processes),
        )

    def cpu_seconds(self) -> float:
        """User and system time of its processes so far, with that of those that have ended."""
        spent = 0.0
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                spent += sum(each.cpu_times()[:4])
        return spent

    def stop(self) -> None:
        """SIGTERM to the group, time to end, then SIGKILL to all that is left."""
        if self._process is None:
            return
        everyone = self.processes()
        try:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
        finally:  # a second Ctrl-C too
            left = {each.pid: each for each in [*everyone, *self.processes()]}
            _kill(left.values())
            self._process.wait()
            self._process = None


def _kill(processes: Iterable[psutil.Process]) -> None:
    for each in (living := [each for each in processes if each.is_running()]):
        with contextlib.suppress(psutil.Error):
            each.kill()
    _, alive = psutil.wait_procs(living, timeout=10)
    if alive:
        pids = ", ".join(str(each.pid) for each in alive)
        raise BenchError(f"Processes of a server cannot be ended: end {pids} before you measure on.")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def wait_ready(
    server: Server, client: Client, *, model: str | None, extra: Mapping[str, object], timeout: float
) -> str:
    """Wait until a request of one token is answered; returns the model's name.

    So that the time to ready means the same for a server that listens at once and loads later. Raises
    BenchError if the server ends, refuses the request for good, or takes longer than `timeout` seconds.
    """
    name = ""

    def check() -> None:
        if (end := server.ended()) is not None:
            raise BenchError(f"It did not become ready: {end}.")

    async def ask() -> Answer:
        nonlocal name
        name = await choose_model(client, model)
        return await client.post("/v1/chat/completions", Target(client, name, extra).unstreamed(["x"]))

    await wait_answered(ask, timeout, check)
    return name

"""Starts an executor as the first thing that `ryzanstein up` does: its imports, PyTorch's above all, take longer than
all that comes before it could be told what to serve, and run beside that. This module imports next to nothing.

    up ──▶ `python -m services.executor -` ──imports──▶ waits ◀──arguments, environment, log── NATS runs by now
                                                          ◀──that weights are not packed yet: more imports

One that nobody tells anything ends with its standard input.
"""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.process import die_with_parent

MODULE = "services.executor"
_NOT_OF_USE = {"stub", "cuda", "off", "--help", "-h"}
_ENDED_WITHIN = 10.0  # seconds for an import that cannot be interrupted
_NVIDIA = Path("/proc/driver/nvidia")


class EarlyExecutor:
    """As asyncio's `Process`, of one that was started before there was a loop."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def tell(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """What it would have been started with, and where its output goes from now on. Raises `OSError` where it is
        gone."""
        assert self._process.stdin is not None
        with self._process.stdin as line:
            line.write(json.dumps([[*arguments], {**environment}, str(log)]).encode() + b"\n")

    def expect_building(self) -> None:
        """No earlier start has kept the model's weights: what makes them is imported while it waits."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.write(b'"builds"\n')
            self._process.stdin.flush()

    async def wait(self) -> int:
        if self._process.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            pidfd = os.pidfd_open(self.pid)
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._process.wait()

    def close(self) -> None:
        """Once it is about to end: waits for that."""
        try:
            self._process.communicate(timeout=_ENDED_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


_early: list[EarlyExecutor] = []


def start_early(arguments: Sequence[str]) -> None:
    """Before the imports of `ryzanstein up`. Not where the arguments or the environment show that another one will be
    needed: the stub's, one that sees other GPUs than we do, or none at all."""
    words = {*arguments, os.environ.get("RYZANSTEIN_ENGINE"), os.environ.get("RYZANSTEIN_FORK_SERVER")}
    words |= {word.partition("=")[2] for word in arguments}
    if sys.platform.startswith("linux") and not words & _NOT_OF_USE and not _NVIDIA.exists():
        _early.append(start())
        atexit.register(end)


def take() -> EarlyExecutor | None:
    """The one that was started early, once; None where it has ended meanwhile."""
    early = _early.pop() if _early else None
    return early if early is not None and early.returncode is None else None


def expect_building() -> None:
    """To the one that was started early, where there is one."""
    for early in _early:
        early.expect_building()


def start() -> EarlyExecutor:
    """An executor that waits to be told what to serve, and ends with this process."""
    process = subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-m", MODULE, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # until it is told its log; where it cannot start, the next one says why
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches us alone: we stop the others in order
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    return EarlyExecutor(process)


def end() -> None:
    """Ends one that nobody has taken, and what it has started before it."""
    early = take()
    if early is not None:
        early.terminate()
        early.close()

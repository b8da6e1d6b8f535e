"""Services as forks of one process that has done their imports: most of what a short-lived one costs.

The fork server is multiprocessing's, one for each process of pytest, started with the first service. A service is
a whole process as `python -m` starts it: its own arguments, environment, log and signals.
"""

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

from shared.process import die_with_parent
from tests.covered import follow_environment
from tests.forked_ranks import STUB_MODULES, fork_ranks

MODULES = [
    "services.executor.supervisor.multinode.node",
    "services.executor.supervisor.service",
    "services.gateway.service",
    "services.health_monitor.service",
    "services.scheduler.service",
    *STUB_MODULES,
]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, *MODULES])
_with_ranks = forkserver.ForkServer()  # of executors with a model that computes: it takes longer to start
_with_ranks.set_forkserver_preload(["tests.rank_imports", __name__, *MODULES])
_one_at_a_time = threading.Lock()


class ForkedProcess:
    """What tests ask of an `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = os.dup(self._process.sentinel)  # several may wait
        loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
    """Starts `python -m module arguments`; its output goes to `log`."""
    words = {*arguments}
    computes = module == "services.executor" and bool({"--model", "--device"} & words) and "stub" not in words
    process = CONTEXT.Process(target=_run, args=(module, [*arguments], {**environment}, str(log)))
    start(process, computes=computes)
    return ForkedProcess(process)


def start(process: ForkServerProcess, *, computes: bool) -> None:
    """Starts a process of `CONTEXT`; `computes`: as a fork of one that has imported what ranks that compute do."""
    server = _with_ranks if computes else forkserver._forkserver  # type: ignore[attr-defined]
    with _one_at_a_time, patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()


def _run(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In the new process."""
    if (arm := die_with_parent()) is not None:
        arm()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    follow_environment()
    sys.argv = [module, *arguments]
    stub = "stub" in arguments
    forks = module == "services.executor" and sys.platform.startswith("linux")
    if forks and (stub or "tests.rank_imports" in sys.modules):
        fork_ranks(stub=stub)
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""Starts the fork server as the first thing that an executor does: its imports take longer than ours, and run beside
them. This module imports next to nothing, for it comes before everything else."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from shared.process import die_with_parent

MODULE = "services.executor.supervisor.ranks.fork_server"
# What libraries read while they are imported. GOMP_SPINCOUNT: turns that an OpenMP thread waits before it sleeps, the
# time between two operations. OpenBLAS, which NumPy has for products that nobody asks for, would start threads, and a
# process of several is not forked. What the operator has set goes first.
RUNTIME = {"GOMP_SPINCOUNT": "10000", "OPENBLAS_NUM_THREADS": "1"}

# A line to a waiting executor: its ranks will make their weights of a model's files, with modules that take seconds to
# import.
BUILDS = "builds"
BUILDERS = ["services.executor.model.loading.loader"]
WAITING = ["-"]  # the arguments of an executor that is told later what it is


class StartedForkServer(NamedTuple):
    process: "subprocess.Popen[bytes]"
    line: socket.socket


_early: list[StartedForkServer] = []


def start_early(arguments: Sequence[str]) -> None:
    """In the executor's main thread, before its imports. Where the `arguments` or the environment show that there is to
    be none, there is none; what they do not show is seen to when the settings are read."""
    if [*arguments] == WAITING:
        signal.signal(signal.SIGTERM, lambda *_: _leave())
    words = [os.environ.get("RYZANSTEIN_ENGINE", ""), os.environ.get("RYZANSTEIN_FORK_SERVER", ""), *arguments]
    if sys.platform.startswith("linux") and not {"stub", "vllm", "off", "--help", "-h"} & {*words}:
        _early.append(start())


def taken() -> StartedForkServer | None:
    """The one that was started early, once."""
    return _early.pop() if _early else None


def start() -> StartedForkServer:
    """A fork server, as a child that ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**RUNTIME, **os.environ},
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    ours.setblocking(False)
    return StartedForkServer(process, ours)


def take_arguments() -> None:
    """What a waiting executor is, from standard input: a line of JSON of its arguments, its environment, and the file
    that it writes its output to; `BUILDS` may come before it. Without it whoever has started us has ended: so do we."""
    told: Any = BUILDS
    while told == BUILDS:
        line = sys.stdin.buffer.readline()
        if not line:
            _leave()
        told = json.loads(line)
        if told == BUILDS and _early:
            with contextlib.suppress(OSError):  # ranks import what they miss
                _early[0].line.send(json.dumps({"type": "import", "modules": BUILDERS}).encode())
    sys.argv[1:], environment, log = told
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing, open(log, "ab") as output:  # noqa: PTH123  # before pathlib
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave() -> NoReturn:
    """Ends this process, the fork server before it."""
    if (forks := taken()) is not None:
        forks.process.kill()
        forks.process.wait()
    os._exit(0)
